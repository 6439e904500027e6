"""What a step is traced with."""

from collections.abc import Callable
from functools import partial
from typing import Any

from minfer_jax.graph.params import CParams, GraphParams, GType
from minfer_jax.memory.memory import Memory
from minfer_jax.memory.plan import plan_memory
from minfer_jax.models.model import Model


def step_of(
    model: Model,
    n_tokens: int,
    *,
    n_out: int = 1,
    n_ctx: int = 256,
    gtype: GType | None = None,
    **cparams: Any,
) -> tuple[Callable[[], Any], GraphParams, tuple]:
    """What makes a step of a model, its params, and the abstract arguments behind them."""
    params = GraphParams(
        n_tokens=n_tokens,
        n_out=n_out,
        gtype=gtype or (GType.DECODE if n_tokens == 1 else GType.PREFILL),
        cparams=CParams(n_ctx=n_ctx, **cparams),
    )
    plan = plan_memory(model.hp, n_ctx=n_ctx, types=params.cparams.kv_format)
    regions = Memory(plan, model.device, 1).abstract_regions()
    args = (model.weights.leaves, regions, model.abstract_inputs(plan, params))
    return partial(model.make_step, plan), params, args
