"""Scopes of instructions, from a module's text."""

import jax
import jax.numpy as jnp
import pytest

from minfer_jax.bench.hlo import Instruction, instructions, merge_layers, module_name, scope_of

MODULE = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused_computation (param_0: f32[4]) -> f32[4] {
  %param_0 = f32[4]{0} parameter(0)
  %param_1 = f32[4]{0} parameter(1)
  %param_2 = f32[4]{0} parameter(2)
  %a.1 = f32[4]{0} add(%param_0, %param_0), metadata={op_name="jit(step)/blk.3/norm/add"}
  ROOT %m.1 = f32[4]{0} multiply(%a.1, %a.1), metadata={op_name="jit(step)/blk.3/norm/mul"}
}

%body.5 (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %copy.9 = f32[4]{0} copy(%state)
}

ENTRY %main.7 (x: f32[4]) -> (f32[4], f32[4]) {
  %x = f32[4]{0} parameter(0), metadata={op_name="x"}
  %fusion.2 = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused_computation
  %copy.3 = f32[4]{0} copy(%fusion.2)
  %bitcast.8 = f32[4]{0} bitcast(%copy.3)
  %while.4 = (s32[], /*index=1*/f32[4]{0}) while(%bitcast.8), condition=%cond.6, body=%body.5, \
metadata={op_name="jit(step)/blk.3/attend/while" stack_frame_id=2}
  %ffi = f32[4]{0} custom-call(%while.4), custom_call_target="f", \
metadata={op_name="jit(step)/blk.12/ffn_down/ffi_call"}, backend_config={a = 1 : i32}
  %copy.10 = f32[4]{0} copy(%x)
  ROOT %t = (f32[4]{0}, f32[4]{0}) tuple(%ffi, %copy.10)
}
"""


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("fusion.2", "blk.3/norm"),  # of what it calls
        ("a.1", "blk.3/norm"),
        ("copy.3", "blk.3/attend"),  # of what uses it in the end
        ("while.4", "blk.3/attend"),
        ("copy.9", "blk.3/attend"),  # of the loop that it stands in
        ("ffi", "blk.12/ffn_down"),
        ("copy.10", ""),
    ],
)
def test_where_an_instruction_comes_from(name, scope):
    assert instructions(MODULE)[name].scope == scope


# A reduction's computation may bear the name of what uses the reduction, and more.
REUSED_NAMES = """HloModule jit_step

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[4]) -> f32[] {
  %p = f32[4]{0} parameter(0)
  %c = f32[] constant(0)
  %copy = f32[4]{0} copy(%p), control-predecessors={%mul}
  %reduce = f32[] reduce(f32[4]{0} %copy, (f32[]) %c), dimensions={0}, to_apply=%add
  %add = f32[] add(%reduce, %reduce)
  ROOT %mul = f32[] multiply(%add, %add), metadata={op_name="jit(step)/output/mul"}
}
"""


def test_what_is_called_is_no_operand():
    found = instructions(REUSED_NAMES)
    assert {name: i.scope for name, i in found.items()} == dict.fromkeys(found, "output")
    loop = REUSED_NAMES.replace(', metadata={op_name="jit(step)/output/mul"}', "")
    assert {i.scope for i in instructions(loop).values()} == {""}


def test_what_an_instruction_is():
    found = instructions(MODULE)
    assert found["while.4"] == Instruction("while", "blk.3/attend")
    assert found["ffi"].opcode == "custom-call" and found["m.1"].opcode == "multiply"
    assert [name for name, i in found.items() if i.is_container] == ["while.4"]
    assert module_name(MODULE) == "jit_step" and module_name("") == ""


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(step)/blk.3/ffn_down/jit(matmul)/dot_general", "blk.3/ffn_down"),
        ("jit(step)/blk.3/add", "blk.3"),
        ("jit(step)/blk.0/attend/while/body/hngd,hcd->hngc/dot_general", "blk.0/attend"),
        ("jit(step)/blk.0/attend/jit(attend_blocked)", "blk.0/attend"),
        ("jit(step)/slice", ""),
        ("weights[3]", ""),
        ("reduce_sum", ""),
        ("", ""),
    ],
)
def test_scopes_of_op_names(op_name, scope):
    assert scope_of(op_name) == scope


@pytest.mark.parametrize(
    ("scope", "merged"),
    [
        ("blk.3/ffn_down", "blk.*/ffn_down"),
        ("blk.29", "blk.*"),
        ("output", "output"),
        ("enc/blk.1/a.b", "enc/blk.*/a.b"),
    ],
)
def test_layers_are_merged(scope, merged):
    assert merge_layers(scope) == merged


def test_the_text_of_this_jaxlib_is_understood():
    def step(x):
        with jax.named_scope("blk.0"), jax.named_scope("norm"):
            x = jnp.tanh(x @ x)
        with jax.named_scope("loop"):
            return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: jnp.sin(x) + x, x)

    text = jax.jit(step).lower(jnp.ones((8, 8), jnp.float32)).compile().as_text()
    assert module_name(text) == "jit_step"
    scopes = {i.scope for i in instructions(text).values()}
    assert {"blk.0/norm", "loop"} <= scopes
    assert any(i.is_container and i.scope == "loop" for i in instructions(text).values())
