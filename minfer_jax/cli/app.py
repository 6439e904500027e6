"""Commands and their flags. Bodies are imported when a command runs, so that help is instant."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from minfer_jax.cli import flags
from minfer_jax.cli.config import ConfigFile, typed_first
from minfer_jax.cli.sampling_flags import GrammarFlags, SamplingFlags, spread
from minfer_jax.errors import UsageError

_NAME = "minfer-jax"

_app = typer.Typer(
    name=_NAME,
    help="Run GGUF language models on JAX: on a GPU, a TPU or a plain CPU.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(argv: list[str] | None = None) -> int:
    """Parse and run; the exit code. Errors and Ctrl-C pass through, bad flags as `UsageError`."""
    command = typer.main.get_command(_app)
    try:
        with command.make_context(_NAME, sys.argv[1:] if argv is None else list(argv)) as ctx:
            code = command.invoke(ctx)
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as error:
        where = getattr(error, "ctx", None)
        asked = f"{where.command_path if where else _NAME} --help"
        message = error.format_message().rstrip(".")
        if message.startswith("No such option") and _takes_text(where):
            message += " (a text that begins with - goes after --)"
        raise UsageError(f"{message}; see `{asked}`") from error
    return code if isinstance(code, int) else 0


def _takes_text(where: Any) -> bool:
    """Whether the command of this context has an argument, which is a text in all that have one."""
    return where is not None and any(p.param_type_name == "argument" for p in where.command.params)


def _typed(ctx: typer.Context) -> set[str]:
    """The parameters that were given on the command line."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"{_NAME} {version(_NAME)}")
        raise typer.Exit()


@_app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    pass


@_app.command()
@spread
def generate(
    ctx: typer.Context,
    *,
    text: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The prompt; - reads it from stdin."),
    ] = None,
    model: flags.Model = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt.")] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", help="A file that holds the prompt.")
    ] = None,
    system: Annotated[
        str, typer.Option("-sys", "--system", help="System message for the chat template.")
    ] = "",
    no_template: Annotated[
        bool, typer.Option("--no-template", help="Continue the prompt as it is.")
    ] = False,
    n_predict: Annotated[
        int, typer.Option("-n", "--n-predict", help="Most tokens; -1: until the context is full.")
    ] = 512,
    n_ctx: Annotated[
        int, typer.Option("-c", "--n-ctx", "--ctx-size", help="Context in tokens; 0: the model's.")
    ] = 2048,
    n_batch: Annotated[
        int, typer.Option("-b", "--n-batch", "--batch-size", help="Prompt tokens per batch.")
    ] = 2048,
    n_ubatch: Annotated[
        int, typer.Option("-ub", "--n-ubatch", "--ubatch-size", help="Prompt tokens per call.")
    ] = 512,
    type_k: flags.TypeK = None,
    type_v: flags.TypeV = None,
    swa_full: flags.SwaFull = False,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End before this text; may be repeated.", show_default=False),
    ] = None,
    sampling: SamplingFlags,
    grammar: GrammarFlags,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "-lp",
            "--logprobs",
            metavar="N",
            help="Report each token's log-probability, and the N likeliest ones.",
            show_default=False,
        ),
    ] = None,
    backend_sampling: Annotated[
        bool,
        typer.Option(
            "-bs/ ",
            "--backend-sampling/--no-backend-sampling",
            help="Choose tokens in the graph, several steps a call, where that can be.",
        ),
    ] = True,
    flash_attn: Annotated[
        str, typer.Option("-fa", "--flash-attn", help="on, off or auto: the attention form.")
    ] = "auto",
    exact: Annotated[
        bool, typer.Option("--exact", help="float32 activations and KV, full precision.")
    ] = False,
    threads: flags.Threads = None,
    device: flags.Device = "auto",
    json: flags.Json = False,
    config: ConfigFile = None,
    debug: flags.Debug = False,
) -> int:
    """Answer a prompt, or continue it with --no-template."""
    from minfer_jax.cli.request import Request, read_prompt

    request = Request(
        model=model,
        prompt_sources=typed_first(ctx, text=text, prompt=prompt, file=file),
        system=system,
        no_template=no_template,
        n_predict=n_predict,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        kv_types=flags.kv_types(type_k, type_v, exact),
        swa_full=swa_full,
        sampling=sampling.params(ctx),
        grammar=grammar.spec(ctx),
        logprobs=logprobs,
        stop=stop or [],
        in_graph=backend_sampling,
        flash_attn=flash_attn,
        exact=exact,
        threads=threads,
        device=device,
        json=json,
    )
    prompt_text = read_prompt(request.prompt_sources)
    # Only now: what is wrong with the flags is said before jax is imported.
    from minfer_jax.cli.generate import run_generate

    return run_generate(request, prompt_text)


@_app.command()
def bench(
    ctx: typer.Context,
    model: flags.Model = None,
    n_prompt: Annotated[
        list[str] | None,
        typer.Option("-p", "--n-prompt", help="Prompt lengths to read, such as 128,512; 0: none."),
    ] = None,
    n_gen: Annotated[
        list[str] | None,
        typer.Option("-n", "--n-gen", help="Numbers of tokens to generate; 0: none."),
    ] = None,
    n_depth: Annotated[
        list[str] | None,
        typer.Option("-d", "--n-depth", help="Tokens that are there before each test."),
    ] = None,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", help="Timed runs of each test.")
    ] = 5,
    threads: flags.Threads = None,
    n_ubatch: Annotated[
        int, typer.Option("-ub", "--n-ubatch", "--ubatch-size", help="Prompt tokens per call.")
    ] = 512,
    exact: Annotated[
        bool, typer.Option("--exact", help="float32 activations and KV, full precision.")
    ] = False,
    device: flags.Device = "auto",
    output: Annotated[str, typer.Option("-o", "--output", help="md, csv or json.")] = "md",
    peer: Annotated[
        str | None,
        typer.Option("--peer", help="llama.cpp: run the same tests there, in turns with ours."),
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option("--peer-python", help="The Python that has llama_cpp. Default: this one."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", help="threads, ubatch or depth: go through --values.")
    ] = None,
    values: Annotated[
        list[str] | None, typer.Option("--values", help="Values of the sweep, such as 1,2,4.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", help="PNG or SVG file for the sweep's curves.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Instead: the decode step by node, sorted by time.")
    ] = False,
    sampling: Annotated[
        bool,
        typer.Option(
            "--sampling",
            help="Also: generation with each token chosen on the host, and in the graph.",
        ),
    ] = False,
    batched: Annotated[
        bool,
        typer.Option(
            "--batched", help="Instead: several sequences at once, llama-batched-bench's."
        ),
    ] = False,
    n_pp: Annotated[
        list[str] | None, typer.Option("-npp", help="Batched: prompt lengths, such as 128,512.")
    ] = None,
    n_tg: Annotated[
        list[str] | None, typer.Option("-ntg", help="Batched: tokens to generate in a sequence.")
    ] = None,
    n_pl: Annotated[
        list[str] | None, typer.Option("-npl", help="Batched: numbers of sequences, such as 1,8.")
    ] = None,
    pp_shared: Annotated[
        bool, typer.Option("-pps", help="Batched: one prompt, shared by all sequences.")
    ] = False,
    kv_unified: Annotated[
        bool,
        typer.Option("--kv-unified", help="Batched: one run of cells for all sequences."),
    ] = False,
    n_ctx: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--n-ctx",
            "--ctx-size",
            help="Batched: context in tokens, of all sequences. Default: what each test needs.",
            show_default=False,
        ),
    ] = None,
    debug: flags.Debug = False,
) -> int:
    """Measure tokens per second, with llama-bench's tests and columns."""
    from minfer_jax.cli import bench as command

    numbers = command.numbers
    if batched:
        from minfer_jax.cli import bench_batched

        bench_batched.refuse_ignored(_typed(ctx))
        return bench_batched.run_batched(
            bench_batched.BatchedRequest(
                model=model,
                n_pp=numbers("-npp", n_pp, bench_batched.PP),
                n_tg=numbers("-ntg", n_tg, bench_batched.TG),
                n_pl=numbers("-npl", n_pl, bench_batched.PL),
                pp_shared=pp_shared,
                kv_unified=kv_unified,
                n_ctx=n_ctx,
                repetitions=repetitions,
                threads=threads,
                n_ubatch=n_ubatch,
                exact=exact,
                device=device,
                output=output,
                peer=peer,
                peer_python=peer_python,
            )
        )
    command.refuse_ignored(_typed(ctx), sweep=sweep, profile=profile)
    request = command.BenchRequest(
        model=model,
        n_prompt=numbers("-p/--n-prompt", n_prompt, command.PROMPT),
        n_gen=numbers("-n/--n-gen", n_gen, command.GEN),
        n_depth=numbers("-d/--n-depth", n_depth, command.DEPTH),
        repetitions=repetitions,
        threads=threads,
        n_ubatch=n_ubatch,
        exact=exact,
        device=device,
        output=output,
        peer=peer,
        peer_python=peer_python,
        sweep=sweep,
        values=numbers("--values", values, ()),
        plot=plot,
        profile=profile,
        sampling=sampling,
    )
    return command.run_bench(request)


@_app.command()
def embed(
    model: flags.Model = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("-p", "--prompt", help="A text; may be repeated.", show_default=False),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("-f", "--file", help="A file with a text in each line. Default: stdin."),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            help="none, mean, cls, last or rank. Default: the model's.",
            show_default=False,
        ),
    ] = None,
    embd_normalize: Annotated[
        int,
        typer.Option(
            "--embd-normalize", help="-1: none, 0: to the range of int16, 2: euclidean, N: N-norm."
        ),
    ] = 2,
    n_ctx: Annotated[
        int,
        typer.Option("-c", "--n-ctx", "--ctx-size", help="Most tokens of a text; 0: the model's."),
    ] = 2048,
    exact: Annotated[
        bool, typer.Option("--exact", help="float32 activations and KV, full precision.")
    ] = False,
    threads: flags.Threads = None,
    device: flags.Device = "auto",
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Print a vector for each text, one a line."""
    from minfer_jax.cli import embed as command

    request = command.EmbedRequest(
        model=model,
        pooling=pooling,
        normalize=embd_normalize,
        n_ctx=n_ctx,
        exact=exact,
        threads=threads,
        device=device,
        json=json,
    )
    return command.run_embed(request, command.read_texts(prompt, file))


@_app.command()
def info(
    model: flags.Model = None,
    n_ctx: Annotated[
        int, typer.Option("-c", "--n-ctx", "--ctx-size", help="Context to size memory for.")
    ] = 2048,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Print a model's metadata, tensors and memory needs."""
    from minfer_jax.cli.info import run_info

    run_info(model, n_ctx=n_ctx, json=json)


@_app.command()
def tokenize(
    text: Annotated[str, typer.Argument(help="The text; - reads it from stdin.")],
    model: flags.Model = None,
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Do not add the model's own special tokens.")
    ] = False,
    no_parse_special: Annotated[
        bool, typer.Option("--no-parse-special", help="Read control tokens as plain text.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Only the ids, as a Python list.")] = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Print the token ids and pieces of a text."""
    from minfer_jax.cli.tokenize import run_tokenize

    run_tokenize(
        model,
        text,
        add_special=not no_bos,
        parse_special=not no_parse_special,
        ids_only=ids,
        json=json,
    )


@_app.command()
def doctor(
    device: flags.Device = "auto", json: flags.Json = False, debug: flags.Debug = False
) -> None:
    """Print versions, devices found and in use, native code and caches."""
    from minfer_jax.cli.doctor import run_doctor

    run_doctor(device, json=json)
