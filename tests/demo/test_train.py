"""The training step and the schedule; skipped where the `train` extra is not installed."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from tools.demo_model import train  # noqa: E402 (needs torch)
from tools.demo_model.model import LONGEST_WINDOW, DemoModel, Shape  # noqa: E402 (needs torch)

SMALL = Shape(vocabulary=50, layers=1, width=32, heads=4, kv_heads=2, feed_forward=32, context=16)


def test_training_reduces_the_loss_on_a_repeated_batch() -> None:
    """The network learns it."""
    torch.manual_seed(0)
    model = DemoModel(SMALL)
    optimizer = train.optimizer_for(model)
    ids = torch.randint(0, 50, (4, 16))
    batch = (ids, torch.ones_like(ids, dtype=torch.bool))
    losses = [train.train_step(model, optimizer, batch, rate=1e-2) for _ in range(20)]
    assert losses[-1] < losses[0] / 2


def test_attention_is_causal() -> None:
    """A changed last token changes no earlier state."""
    torch.manual_seed(0)
    model = DemoModel(SMALL)
    ids = torch.randint(0, 50, (1, 8))
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 50
    before, after = model.hidden(ids), model.hidden(changed)
    assert torch.allclose(before[:, :-1], after[:, :-1], atol=1e-6)


def test_schedule_covers_every_step() -> None:
    """Every step has a window and a rate, and long windows come before the rate is low."""
    windows = [train.stage_at(step)[1] for step in range(train.TOTAL_STEPS)]
    rates = [train.rate_at(step) for step in range(train.TOTAL_STEPS)]
    assert set(windows) == {256, 1024, LONGEST_WINDOW}
    assert min(rates) > 0
    assert rates[windows.index(1024)] > max(rates) / 2


def test_schedule_ends_after_the_last_step() -> None:
    """A later step is refused."""
    with pytest.raises(ValueError, match="after the last cycle"):
        train.stage_at(train.TOTAL_STEPS)
