"""GET /v1/models, and what is asked for beside a model of text and is not there."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.responses import Response

from outrider.server.desk import Desk, TheDesk
from outrider.server.endpoints.described import problems
from outrider.server.problems import Refused
from outrider.server.shapes.plain import Model, Models

router = APIRouter()


@router.get("/models", responses=problems())
async def models(desk: TheDesk) -> Models:
    """The model that is served, by each of its names."""
    names = desk.model.names
    return Models(data=[_model(desk, name) for name in names], first_id=names[0], last_id=names[-1])


@router.get("/models/{name:path}", responses=problems())
async def model(name: str, desk: TheDesk) -> Model:
    """One name's."""
    desk.check_model(name)
    return _model(desk, name)


@router.post("/embeddings", include_in_schema=False)
async def embeddings(desk: TheDesk) -> Response:
    """Frameworks ask for them beside a chat model."""
    raise Refused(
        f"embeddings are not served here: {desk.model.id} is a model that writes text, and Outrider has none that makes"
        " embeddings; point the embeddings' base URL at a server that does",
        status=404,
    )


def _model(desk: Desk, name: str) -> Model:
    made = desk.model.loaded_at
    return Model(
        id=name,
        created=made,
        created_at=datetime.fromtimestamp(made, UTC).isoformat().replace("+00:00", "Z"),
        display_name=name,
        max_model_len=desk.model.context_length,
        chat_template=desk.model.template is not None,
        max_input_tokens=desk.model.context_length,
        description=desk.model.note or None,
    )
