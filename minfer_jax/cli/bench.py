"""`bench`: tests, with a peer or over a sweep, or the decode step by node; results on stdout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minfer_jax.cli.bench_output import FORMATS, Printer, announce
from minfer_jax.cli.interrupt import cleaned_up_on_termination, stop_on_interrupt
from minfer_jax.cli.request import check_threads
from minfer_jax.cli.session import load_model, local_file, note
from minfer_jax.errors import UsageError
from minfer_jax.settings import Settings

if TYPE_CHECKING:
    from minfer_jax.bench.ours import OurSide
    from minfer_jax.bench.peer import PeerSide
    from minfer_jax.bench.workload import Workload
    from minfer_jax.lm import LanguageModel
    from minfer_jax.memory.plan import MemoryPlan

PROMPT, GEN, DEPTH = (512,), (128,), (0,)

UBATCH = 512  # shown only where it is another, as llama-bench does
MOST_TOKENS = 1 << 20
MOST_REPETITIONS = 1000
MOST_UBATCH = 1 << 16


class _Swept(NamedTuple):
    """A setting that a sweep goes through."""

    param: str
    """Of the command."""
    flag: str
    key: str
    """Of the rows."""


_SWEEPS = {
    "threads": _Swept("threads", "-t/--threads", "n_threads"),
    "ubatch": _Swept("n_ubatch", "-ub/--n-ubatch", "n_ubatch"),
    "depth": _Swept("n_depth", "-d/--n-depth", "n_depth"),
}
_NOT_PROFILED = {"n_prompt": "-p", "n_gen": "-n", "repetitions": "-r"}
_BATCHED_ONLY = {
    "n_pp": "-npp",
    "n_tg": "-ntg",
    "n_pl": "-npl",
    "pp_shared": "-pps",
    "kv_unified": "--kv-unified",
    "n_ctx": "-c/--n-ctx",
}


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The flags of one run; raises `UsageError` for values out of range."""

    model: str | None
    n_prompt: tuple[int, ...]
    n_gen: tuple[int, ...]
    n_depth: tuple[int, ...]
    repetitions: int
    threads: int | None
    n_ubatch: int
    exact: bool
    device: str
    output: str
    peer: str | None
    peer_python: str | None
    sweep: str | None
    values: tuple[int, ...]
    plot: str | None
    profile: bool
    sampling: bool = False

    def __post_init__(self) -> None:
        for flag, values in (
            ("-p/--n-prompt", self.n_prompt),
            ("-n/--n-gen", self.n_gen),
            ("-d/--n-depth", self.n_depth),
        ):
            for value in values:
                within(flag, value, 0, MOST_TOKENS)
        within("-r/--repetitions", self.repetitions, 1, MOST_REPETITIONS)
        within("-ub/--n-ubatch", self.n_ubatch, 1, MOST_UBATCH)
        check_threads(self.threads)
        one_of("-o/--output", self.output, FORMATS)
        if not self.profile and not any(self.n_prompt) and not any(self.n_gen):
            raise UsageError("nothing to measure: both -p and -n are 0")
        if self.profile and self.output == "csv":
            raise UsageError("--profile has no CSV form: give -o md or -o json")
        check_peer(self.peer, self.peer_python)
        if self.profile and self.peer is not None:
            raise UsageError("--profile looks at our own decode step: leave --peer out")
        if self.sampling and self.profile:
            raise UsageError("--profile looks at the decode step alone: leave --sampling out")
        if self.sampling and self.peer is not None:
            raise UsageError("--sampling compares two ways of ours: leave --peer out")
        if self.sampling and not any(self.n_gen):
            raise UsageError("--sampling measures generation: give -n")
        self._check_sweep()

    def _check_sweep(self) -> None:
        if self.sweep is None:
            for flag, given in (("--values", self.values), ("--plot", self.plot)):
                if given:
                    raise UsageError(f"{flag} needs --sweep {'|'.join(_SWEEPS)}")
            return
        one_of("--sweep", self.sweep, tuple(_SWEEPS))
        if self.profile:
            raise UsageError("--profile looks at one setting: leave --sweep out")
        if not self.values:
            raise UsageError("--sweep needs --values, such as --values 1,2")
        for value in self.values:
            if self.sweep == "threads":
                check_threads(value, "--values")
            elif self.sweep == "ubatch":
                within("--values", value, 1, MOST_UBATCH)
            else:
                within("--values", value, 0, MOST_TOKENS)

    def argv(self, value: int | None = None) -> list[str]:
        """The flags that ask for the same, or for the tests of one value of the sweep alone."""
        swept = {} if self.sweep is None else {self.sweep: None if value is None else str(value)}
        threads = None if self.threads is None else str(self.threads)
        given = {
            "-m": self.model,
            "-p": None if self.profile else ",".join(map(str, self.n_prompt)),
            "-n": None if self.profile else ",".join(map(str, self.n_gen)),
            "-d": swept.get("depth", ",".join(map(str, self.n_depth))),
            "-r": None if self.profile else str(self.repetitions),
            "-t": swept.get("threads", threads),
            "-ub": swept.get("ubatch", str(self.n_ubatch)),
            "--device": None if self.device == "auto" else self.device,
            "--peer": self.peer,
            "--peer-python": self.peer_python,
        }
        if value is None and self.sweep is not None:
            given |= {"--sweep": self.sweep, "--values": ",".join(map(str, self.values))}
        flags = [part for flag, text in given.items() if text is not None for part in (flag, text)]
        switches = {
            "--exact": self.exact,
            "--profile": self.profile,
            "--sampling": self.sampling,
        }
        return flags + [flag for flag, given in switches.items() if given]


def refuse_ignored(typed: Collection[str], *, sweep: str | None, profile: bool) -> None:
    """Raise `UsageError` if one of the `typed` parameters has no meaning beside another flag, or
    without `--batched`."""
    for param, flag in _BATCHED_ONLY.items():
        if param in typed:
            raise UsageError(f"{flag} needs --batched")
    if profile:
        for param, flag in _NOT_PROFILED.items():
            if param in typed:
                raise UsageError(f"--profile traces decode steps, always as many: leave {flag} out")
    swept = _SWEEPS.get(sweep or "")
    if swept and swept.param in typed:
        raise UsageError(f"--sweep {sweep} goes through --values: leave {swept.flag} out")


def numbers(flag: str, texts: Sequence[str] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """The integers of a flag that takes lists, `512,1024`, and may be given several times."""
    if not texts:
        return default
    found = []
    for text in ",".join(texts).split(","):
        digits = text.strip().removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
            raise UsageError(f"{flag} is {text!r}; allowed: integers, separated by commas")
        found.append(int(text))
    return tuple(found)


def run_bench(request: BenchRequest) -> int:
    """The exit code."""
    if request.plot is not None:
        from minfer_jax.bench.plot import check_plot

        check_plot(Path(request.plot))
    settings = Settings.from_env()
    path = local_file(request.model, settings)
    tests = _tests(request)
    _check_context(path, tests)
    with cleaned_up_on_termination():
        if request.sweep is not None:
            _sweep(request)
            return 0
        with stop_on_interrupt() as asked, ExitStack() as stack:
            peer = None
            if request.peer is not None:
                from minfer_jax.bench.peer import started

                peer = stack.enter_context(started(request.peer_python, abort=asked.is_set))
            _bench(request, path, settings, tests, peer, asked.is_set)
    return 0


def _tests(request: BenchRequest) -> list[Workload]:
    """All that will be measured; of a sweep, all that some value needs."""
    from minfer_jax.bench.workload import PROFILE_STEPS, plan

    if request.profile:
        return plan((), (PROFILE_STEPS,), request.n_depth)
    depths = request.values if request.sweep == "depth" else request.n_depth
    ways = ("", "host", "loop") if request.sampling else ("",)
    return plan(request.n_prompt, request.n_gen, depths, sampling=ways)


def _bench(
    request: BenchRequest,
    path: Path,
    settings: Settings,
    tests: Sequence[Workload],
    peer: PeerSide | None,
    abort: Callable[[], bool],
) -> None:
    """Load the model on both sides and run what was asked for."""
    n_ctx = max(test.n_ctx for test in tests)
    lm = load_model(
        path,
        settings,
        interrupted=abort,
        n_ctx=n_ctx,
        n_ubatch=request.n_ubatch,
        exact=request.exact,
        device=request.device,
        threads=request.threads,
    )
    if request.profile:
        _profile(request, lm, tests, abort)
        return
    if peer is not None:
        from minfer_jax.device import threads

        peer.load(
            path,
            n_ctx=n_ctx,
            n_ubatch=request.n_ubatch,
            n_threads=threads(),
            on_cpu=lm.model.device.platform == "cpu",
            exact=request.exact,
        )
    _measure(request, lm, tests, peer, abort)


def _check_context(path: Path, tests: Sequence[Workload]) -> None:
    """Refuse tests of more tokens than the model was made for, where figures mean nothing."""
    from minfer_jax.gguf import open_gguf
    from minfer_jax.models.registry import architecture

    with open_gguf(path) as file:
        n_ctx_train = architecture(file).hparams(file).n_ctx_train
    largest = max(tests, key=lambda test: test.n_ctx)
    if largest.n_ctx > n_ctx_train:
        raise UsageError(
            f"{largest.name} needs a context of {largest.n_ctx} tokens, this model's is"
            f" {n_ctx_train}: lower -d, -p or -n"
        )


def _measure(
    request: BenchRequest,
    lm: LanguageModel,
    tests: Sequence[Workload],
    peer: PeerSide | None,
    abort: Callable[[], bool],
) -> None:
    """All tests, and the rows that come of them."""
    from minfer_jax.bench.ours import OurSide
    from minfer_jax.bench.report import as_row, head_lines
    from minfer_jax.bench.run import measure
    from minfer_jax.bench.workload import random_tokens
    from minfer_jax.device import device_errors

    ours = OurSide(lm.context(n_ctx=lm.n_ctx), abort=abort)
    setup = _setup(request, ours)
    known = None if peer is None else {"name": peer.name, "version": peer.version}
    printer = _printer(request, peer=known)
    printer.head(head_lines(setup))
    tokens = random_tokens(lm.n_ctx, lm.model.hp.n_vocab)
    try:
        for test in tests:
            announce(f"measuring {test.name}")
            with device_errors():
                measured = measure(
                    test,
                    tokens[: test.n_ctx],
                    ours=ours,
                    peer=peer,
                    repetitions=request.repetitions,
                )
            printer.row(as_row(setup, measured, known))
        announce("measuring the memory's bandwidth")
        _add_totals(lm, ours.context.store.plan, tests, printer.rows)
    finally:
        printer.foot()
    if abort():  # in the last call, or since
        raise KeyboardInterrupt


def _setup(request: BenchRequest, ours: OurSide) -> dict[str, Any]:
    from dataclasses import asdict

    from minfer_jax.bench.setup import describe

    flags = " ".join(request.argv())
    return asdict(
        describe(ours.context, n_ubatch=request.n_ubatch, exact=request.exact, flags=flags)
    )


def _add_totals(
    lm: LanguageModel, plan: MemoryPlan, tests: Sequence[Workload], rows: list[dict]
) -> None:
    """What is known only after all tests; the memory first, since what follows takes a lot."""
    from minfer_jax.bench.bandwidth import bytes_per_token, read_bandwidth
    from minfer_jax.bench.machine import peak_memory
    from minfer_jax.bench.setup import weights_read
    from minfer_jax.device import threads

    peak = peak_memory()
    on_cpu = lm.model.device.platform == "cpu"
    bandwidth = read_bandwidth(threads()) if on_cpu else None
    weights = weights_read(lm.model)
    for test, row in zip(tests, rows, strict=True):
        nbytes = fraction = None
        if test.n_gen:
            nbytes = bytes_per_token(test, weights, lm.model.hp, plan)
            fraction = nbytes * row["median_ts"] / bandwidth if bandwidth else None
        row["peak_memory_bytes"] = peak
        row["bandwidth_gbs"] = bandwidth and round(bandwidth / 1e9, 2)
        row["bytes_per_token"] = nbytes
        row["bandwidth_fraction"] = fraction and round(fraction, 4)


def _sweep(request: BenchRequest) -> None:
    """Each value in its own process; this one starts no jax."""
    from minfer_jax.bench.report import head_lines
    from minfer_jax.bench.sweep import bench_in_process

    assert request.sweep is not None
    printer = _printer(request, peer={"name": request.peer} if request.peer else None)
    try:
        for value in request.values:
            announce(f"measuring with {request.sweep} {value}")
            rows = bench_in_process(request.argv(value))
            if not printer.rows:
                printer.head(head_lines({**rows[0], "flags": " ".join(request.argv())}))
            for row in rows:
                printer.row(row)
    finally:
        printer.foot()
    if request.plot is not None:
        from minfer_jax.bench.plot import save_plot

        save_plot(Path(request.plot), printer.rows, _SWEEPS[request.sweep].key)
        note(f"plot written to {request.plot}")


def _profile(
    request: BenchRequest,
    lm: LanguageModel,
    tests: Sequence[Workload],
    abort: Callable[[], bool],
) -> None:
    """The decode step by node, once for every depth."""
    import json
    from dataclasses import asdict

    from minfer_jax.bench.ours import OurSide
    from minfer_jax.bench.profile import profile_decode
    from minfer_jax.bench.report import head_lines, profile_lines
    from minfer_jax.bench.workload import random_tokens
    from minfer_jax.device import device_errors

    ours = OurSide(lm.context(n_ctx=lm.n_ctx), abort=abort)
    setup = _setup(request, ours)
    tokens = random_tokens(lm.n_ctx, lm.model.hp.n_vocab)
    profiles = []
    for test in tests:
        announce(f"tracing decode steps at depth {test.n_depth}")
        with device_errors():
            profiles.append(profile_decode(test, tokens[: test.n_ctx], ours))
    if abort():  # in the last step, or since
        raise KeyboardInterrupt
    if request.output == "json":
        print(json.dumps([{**setup, **asdict(p)} for p in profiles], indent=2, ensure_ascii=False))
        return
    print("\n".join(head_lines(setup)))
    for profile in profiles:
        print("\n".join(["", *profile_lines(profile)]))


def _printer(request: BenchRequest, *, peer: dict[str, str] | None) -> Printer:
    from minfer_jax.bench.report import bench_table, foot_lines

    table = bench_table(
        show_ubatch=request.n_ubatch != UBATCH or request.sweep == "ubatch",
        peer=" ".join(peer.values()) if peer else None,
    )
    return Printer(request.output, table, foot_lines)


def check_peer(peer: str | None, python: str | None) -> None:
    """Raise `UsageError` for a peer that there is none of, or a Python for none."""
    from minfer_jax.bench.peer import PEERS

    if peer is not None:
        one_of("--peer", peer, PEERS)
    elif python is not None:
        raise UsageError("--peer-python needs --peer")


def within(flag: str, value: int, low: int, high: int) -> None:
    """Raise `UsageError` unless `value` is `low` to `high`."""
    if not low <= value <= high:
        raise UsageError(f"{flag} is {value}; allowed: {low} to {high}")


def one_of(flag: str, value: str, allowed: Sequence[str]) -> None:
    """Raise `UsageError` unless `value` is `allowed`."""
    if value not in allowed:
        raise UsageError(f"{flag} is {value!r}; allowed: {', '.join(allowed)}")
