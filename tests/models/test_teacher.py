"""The distillation loss equals its definition, and is smallest for the teacher itself."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch (the extra `train`)")

from models.training.teacher import kl_to_teacher  # noqa: E402


def teacher_view(logits: object, top: int) -> tuple[object, object]:
    best = torch.log_softmax(logits, dim=-1).topk(top, dim=-1)
    return best.indices, best.values


def test_loss_is_the_divergence_between_the_lumped_distributions() -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    ids, log_probs = teacher_view(teacher, 5)
    p, q = teacher.softmax(-1).gather(-1, ids), student.softmax(-1).gather(-1, ids)
    p, q = (torch.cat((kept, 1 - kept.sum(-1, keepdim=True)), dim=-1) for kept in (p, q))
    expected = (p * (p / q).log()).sum(-1).mean()
    assert kl_to_teacher(student, ids, log_probs).item() == pytest.approx(expected.item(), abs=1e-5)


def test_loss_is_zero_at_the_teacher_for_any_lumped_rest() -> None:
    torch.manual_seed(1)
    teacher = torch.randn(4, 8)
    swapped = teacher.clone()
    ids, log_probs = teacher_view(teacher, 5)
    rest = [token for token in range(8) if token not in ids[0].tolist()]
    swapped[0, rest] = teacher[0, rest[::-1]]
    assert kl_to_teacher(teacher, ids, log_probs).item() == pytest.approx(0, abs=1e-6)
    assert kl_to_teacher(swapped, ids, log_probs).item() == pytest.approx(0, abs=1e-6)


def test_certain_teacher_gives_a_finite_loss_and_gradient() -> None:
    student = torch.randn(1, 6, requires_grad=True)
    ids, log_probs = torch.tensor([[2, 4]]), torch.tensor([[0.0, -60000.0]])
    loss = kl_to_teacher(student, ids, log_probs)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(student.grad).all()
    assert loss.item() == pytest.approx(-student.log_softmax(-1)[0, 2].item(), abs=1e-5)
