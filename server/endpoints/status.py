"""GET /health, /ready, /version and /metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Stats
from outrider.protocol.version import PACKAGE_VERSION
from outrider.server.desk import Desk, TheDesk
from outrider.server.endpoints.described import problems
from outrider.server.shapes.plain import Health, Ready, Version

router = APIRouter()


@router.get("/health", responses=problems())
async def health() -> Health:
    """This process lives."""
    return Health()


@router.get("/version", responses=problems())
async def version() -> Version:
    """Outrider's own."""
    return Version(version=PACKAGE_VERSION)


@router.get("/ready", responses={**problems(), 503: {"model": Ready}})
async def ready(desk: TheDesk, response: Response) -> Ready:
    """Whether requests are completed now: 200, or 503 with what is awaited."""
    stats = await _stats(desk)
    if stats is None or desk.draining:
        response.status_code = 503
        return Ready(status="unreachable" if stats is None else "ending")
    workers = {worker.name: worker.state for worker in stats.workers}
    is_ready = any(worker.role == "target" and worker.state == "ready" for worker in stats.workers)
    response.status_code = 200 if is_ready else 503
    return Ready(status="ready" if is_ready else "starting", workers=workers)


@router.get("/metrics", response_class=Response, responses={**problems(), 200: {"content": {"text/plain": {}}}})
async def metrics(desk: TheDesk) -> Response:
    """For Prometheus."""
    text = await asyncio.to_thread(desk.metrics.text, await _stats(desk))  # others have news to write meanwhile
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _stats(desk: Desk) -> Stats | None:
    try:
        return await desk.behind.stats()
    except OutriderError:
        return None
