"""`bench --batched`: several sequences at once, with a peer or without; results on stdout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minfer_jax.cli.bench import (
    MOST_REPETITIONS,
    MOST_TOKENS,
    MOST_UBATCH,
    check_peer,
    one_of,
    within,
)
from minfer_jax.cli.bench_output import FORMATS, Printer, announce
from minfer_jax.cli.interrupt import cleaned_up_on_termination, stop_on_interrupt
from minfer_jax.cli.request import check_threads
from minfer_jax.cli.session import load_model, local_file
from minfer_jax.errors import UsageError
from minfer_jax.settings import Settings

if TYPE_CHECKING:
    from minfer_jax.bench.batched import BatchedTest, OurBatchedSide
    from minfer_jax.bench.peer import PeerSide
    from minfer_jax.lm import LanguageModel

PP, TG, PL = (128,), (128,), (1, 2, 4, 8)
MOST_SEQUENCES = 256
"""That a context can have."""
MOST_CELLS = 1 << 24

_NOT_BATCHED = {
    "n_prompt": "-p (its prompts are -npp)",
    "n_gen": "-n (its steps are -ntg)",
    "n_depth": "-d",
    "sweep": "--sweep",
    "values": "--values",
    "plot": "--plot",
    "profile": "--profile",
    "sampling": "--sampling",
}


@dataclass(frozen=True, kw_only=True)
class BatchedRequest:
    """The flags of one run; raises `UsageError` for values out of range."""

    model: str | None
    n_pp: tuple[int, ...]
    n_tg: tuple[int, ...]
    n_pl: tuple[int, ...]
    pp_shared: bool
    kv_unified: bool
    n_ctx: int | None
    """None: what each test needs."""
    repetitions: int
    threads: int | None
    n_ubatch: int
    exact: bool
    device: str
    output: str
    peer: str | None
    peer_python: str | None

    def __post_init__(self) -> None:
        for flag, values, most in (
            ("-npp", self.n_pp, MOST_TOKENS),
            ("-ntg", self.n_tg, MOST_TOKENS),
            ("-npl", self.n_pl, MOST_SEQUENCES),
            ("-c/--n-ctx", () if self.n_ctx is None else (self.n_ctx,), MOST_CELLS),
        ):
            for value in values:
                within(flag, value, 1, most)
        within("-r/--repetitions", self.repetitions, 1, MOST_REPETITIONS)
        within("-ub/--n-ubatch", self.n_ubatch, 1, MOST_UBATCH)
        check_threads(self.threads)
        one_of("-o/--output", self.output, FORMATS)
        check_peer(self.peer, self.peer_python)

    def argv(self) -> list[str]:
        """The flags that ask for the same."""
        given = {
            "-m": self.model,
            "-npp": ",".join(map(str, self.n_pp)),
            "-ntg": ",".join(map(str, self.n_tg)),
            "-npl": ",".join(map(str, self.n_pl)),
            "-c": None if self.n_ctx is None else str(self.n_ctx),
            "-r": str(self.repetitions),
            "-t": None if self.threads is None else str(self.threads),
            "-ub": str(self.n_ubatch),
            "--device": None if self.device == "auto" else self.device,
            "--peer": self.peer,
            "--peer-python": self.peer_python,
        }
        flags = [part for flag, text in given.items() if text is not None for part in (flag, text)]
        switches = ("-pps", self.pp_shared), ("--kv-unified", self.kv_unified)
        for flag, on in (*switches, ("--exact", self.exact)):
            flags += [flag] * on
        return ["--batched", *flags]

    def ctx_of(self, test: BatchedTest) -> int:
        """Places of the context that a test gets."""
        return test.n_kv if self.n_ctx is None else self.n_ctx


def refuse_ignored(typed: Collection[str]) -> None:
    """Raise `UsageError` if one of the `typed` parameters has no meaning beside `--batched`."""
    for param, flag in _NOT_BATCHED.items():
        if param in typed:
            raise UsageError(f"--batched has tests of its own: leave {flag} out")


def run_batched(request: BatchedRequest) -> int:
    """The exit code."""
    from minfer_jax.bench.batched import plan_batched

    settings = Settings.from_env()
    path = local_file(request.model, settings)
    tests = plan_batched(
        request.n_pp,
        request.n_tg,
        request.n_pl,
        shared=request.pp_shared,
        unified=request.kv_unified,
    )
    n_ctx_train = _trained_context(path)
    _check_room(request, tests, n_ctx_train)
    with cleaned_up_on_termination(), stop_on_interrupt() as asked, ExitStack() as stack:
        peer = None
        if request.peer is not None:
            from minfer_jax.bench.peer import started

            peer = stack.enter_context(started(request.peer_python, abort=asked.is_set))
        _bench(request, path, settings, tests, peer, asked.is_set)
    return 0


def _trained_context(path: Path) -> int:
    from minfer_jax.gguf import open_gguf
    from minfer_jax.models.registry import architecture

    with open_gguf(path) as file:
        return architecture(file).hparams(file).n_ctx_train


def _check_room(request: BatchedRequest, tests: Sequence[BatchedTest], n_ctx_train: int) -> None:
    """Refuse sequences longer than the model was made for, and tests that -c does not hold."""
    longest = max(tests, key=lambda test: test.n_ctx_seq)
    if longest.n_ctx_seq > n_ctx_train:
        raise UsageError(
            f"{longest.name} needs sequences of {longest.n_ctx_seq} tokens, this model's context is"
            f" {n_ctx_train}: lower -npp or -ntg"
        )
    largest = max(tests, key=lambda test: test.n_kv)
    allowed = request.n_ctx or MOST_CELLS
    if largest.n_kv > allowed:
        given = "allowed are at most" if request.n_ctx is None else "-c/--n-ctx is"
        raise UsageError(
            f"{largest.name} needs a context of {largest.n_kv} tokens, {given} {allowed}:"
            f" lower -npp, -ntg or -npl{'' if request.n_ctx is None else ', or raise -c'}"
        )


def _bench(
    request: BatchedRequest,
    path: Path,
    settings: Settings,
    tests: Sequence[BatchedTest],
    peer: PeerSide | None,
    abort: Callable[[], bool],
) -> None:
    """Load the model on both sides and run what was asked for."""
    lm = load_model(
        path,
        settings,
        interrupted=abort,
        n_ctx=max(test.n_ctx_seq for test in tests),
        n_ubatch=request.n_ubatch,
        exact=request.exact,
        device=request.device,
        threads=request.threads,
    )
    from minfer_jax.bench.batched import OurBatchedSide
    from minfer_jax.limits import N_BATCH

    ours = OurBatchedSide(lm, n_batch=max(N_BATCH, request.n_ubatch), abort=abort)
    for test in tests:  # what memory does not hold is refused here, before any compute
        ours.open(n_ctx=request.ctx_of(test), n_seq_max=test.n_seq, kv_unified=test.unified)
    if peer is not None:
        from minfer_jax.device import threads

        peer.load(
            path,
            n_ctx=tests[0].n_ctx_seq,
            n_ubatch=request.n_ubatch,
            n_threads=threads(),
            on_cpu=lm.model.device.platform == "cpu",
            exact=request.exact,
        )
    _measure(request, lm, tests, ours, peer)
    if abort():  # in the last call, or since
        raise KeyboardInterrupt


def _measure(
    request: BatchedRequest,
    lm: LanguageModel,
    tests: Sequence[BatchedTest],
    ours: OurBatchedSide,
    peer: PeerSide | None,
) -> None:
    """All tests, and the rows that come of them."""
    from minfer_jax.bench.batched import measure_batched
    from minfer_jax.bench.batched_report import (
        batched_foot_lines,
        batched_head_lines,
        batched_row,
        batched_table,
        speedup,
    )
    from minfer_jax.bench.report import head_lines
    from minfer_jax.device import device_errors

    setup = _setup(request, lm)
    known = None if peer is None else {"name": peer.name, "version": peer.version}
    table = batched_table(peer=peer and peer.name, with_speedup=1 in request.n_pl)
    printer = Printer(request.output, table, batched_foot_lines)
    about = batched_head_lines(
        setup, shared=request.pp_shared, unified=request.kv_unified, peer=known
    )
    printer.head([*head_lines(setup), *about])
    try:
        for test in tests:
            announce(f"measuring {test.name}")
            with device_errors():
                measured = measure_batched(
                    test,
                    n_ctx=request.ctx_of(test),
                    ours=ours,
                    peer=peer,
                    repetitions=request.repetitions,
                )
            row = batched_row(setup, measured, known)
            printer.row({**row, "speedup": speedup(row, printer.rows)})
        _add_totals(request, lm, ours, printer.rows)
    finally:
        printer.foot()


def _setup(request: BatchedRequest, lm: LanguageModel) -> dict[str, Any]:
    from minfer_jax.bench.setup import describe
    from minfer_jax.limits import N_BATCH

    setup = describe(
        lm.context(n_ctx=lm.n_ctx),
        n_ubatch=request.n_ubatch,
        exact=request.exact,
        flags=" ".join(request.argv()),
    )
    return {**asdict(setup), "n_batch": max(N_BATCH, request.n_ubatch)}


def _add_totals(
    request: BatchedRequest, lm: LanguageModel, ours: OurBatchedSide, rows: list[dict]
) -> None:
    """What is known only after all tests."""
    from minfer_jax.bench.batched_report import fork_fields
    from minfer_jax.bench.machine import peak_memory
    from minfer_jax.device import device_errors

    peak = peak_memory()
    n_tokens = fork_tokens(request, lm.model.hp.n_ctx_train)
    announce(f"measuring what it costs to share {n_tokens} tokens")
    with device_errors():
        cost = ours.fork_cost(n_tokens, repetitions=request.repetitions)
    for row in rows:
        row["peak_memory_bytes"] = peak
        row["fork"] = fork_fields(cost)


def fork_tokens(request: BatchedRequest, n_ctx_train: int) -> int:
    """The prefix whose sharing is measured; where it does not fit, the longest prompt."""
    from minfer_jax.bench.batched import FORK_TOKENS

    room = n_ctx_train if request.n_ctx is None else min(n_ctx_train, request.n_ctx)
    return FORK_TOKENS if room >= FORK_TOKENS else max(request.n_pp)
