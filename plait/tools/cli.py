"""The `plait` command. Imports nothing heavy until a command runs, so that `--help` answers at once.

Exit codes and the form of errors: plait/tools/group.py. What docs/commands.md says is made of what stands here.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import click

from plait.plan.device import SPECS
from plait.tools.bench import PEERS, SUITES
from plait.tools.group import Commands, debug_option
from plait.tools.plain import as_json as to_json

TARGETS = tuple(SPECS)
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
_JSON_FILE = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, allow_dash=True), help="Write JSON here; -: to stdout."
)
_OPTIONS = click.option("--option", "options", multiple=True, help="name=value, passed to plait; may be repeated.")
_SEEDS = click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Sets of ordinary values.")


def _options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """The pairs of --option, checked before anything heavy is loaded."""
    from plait.options import Options
    from plait.tools.bench_main import parse_options

    given: dict[str, Any] = dict(parse_options(pairs))
    Options.make(None, given)
    return given


def _is_typed(ctx: click.Context, p: click.Parameter) -> bool:
    return p.name is not None and ctx.get_parameter_source(p.name) is click.core.ParameterSource.COMMANDLINE


def _print_json(command: str, facts: dict[str, Any]) -> None:
    click.echo(to_json("cache", {"command": command, **facts}))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="plait")
def main() -> None:
    """plait: a kernel-fusion compiler for PyTorch whose decisions can be read."""


@main.command()
@click.argument("file", required=False)
@click.option("--top", default=5, show_default=True, type=click.IntRange(1), help="Refused fusions to list.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads (default: torch's).")
@click.option("--backend", default="plait", hidden=True)
@_AS_JSON
@debug_option()
def demo(file: str | None, top: int, threads: int | None, backend: str, as_json: bool) -> NoReturn:
    """Embed the sentences of FILE (one a line; a sample without it) in eager, under plait and under Inductor, and compare."""
    from plait.tools.demo import read_sentences

    sentences = read_sentences(file)  # before torch is loaded: a wrong name should say so at once
    from plait.tools.demo import run

    sys.exit(run(sentences, top=top, threads=threads, backend=backend, as_json=as_json))


@main.command()
@click.option("--suite", type=click.Choice(SUITES), default="kernels", show_default=True, help="What to time.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where.")
@click.option("--peers", default="eager,inductor", show_default=True, help=f"Of {', '.join(PEERS)}; comma-separated.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the rows here, after each one.")
@click.option("--only", help="Regular expression on workload names.")
@click.option("--seconds", default=5.0, show_default=True, help="Measuring time a workload.")
@click.option(
    "--train-steps", default=20, show_default=True, help="Steps of the loss-curve check of training models; 0: none."
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads (default: torch's).")
@_OPTIONS
@click.option(
    "--timeout", default=900.0, show_default=True, help="Seconds without progress before a workload is given up."
)
@click.option("--backend", default="plait", hidden=True)
@click.option("--show", type=click.Path(exists=True, dir_okay=False), help="Print the table of an earlier run's file.")
@click.option("--markdown", is_flag=True, help="With --show: a table for a document.")
@debug_option()
def bench(
    suite: str,
    device: str,
    peers: str,
    json_path: str | None,
    only: str | None,
    seconds: float,
    train_steps: int,
    threads: int | None,
    options: tuple[str, ...],
    timeout: float,
    backend: str,
    show: str | None,
    markdown: bool,
) -> NoReturn:
    """Time the workloads against eager and Inductor, check their results, and print a table.

    Contenders take turns; medians are reported. A workload that fails is a row with its error, and the exit code is 1."""
    from plait.tools.bench import Job, run
    from plait.tools.bench import show as show_file

    if show is not None:
        sys.exit(show_file(show, markdown))
    names = tuple(p for p in peers.split(",") if p)
    given = _options(options)
    job = Job(suite, device, names, json_path, only, seconds, backend, given, train_steps, threads, timeout)
    sys.exit(run(job))


@main.command()
@click.argument("file")
@click.option("--train", is_flag=True, help="With the backward, from the sum of the results.")
@click.option("--target", type=click.Choice(TARGETS), help="Plan and compile for a device that need not be here.")
@_JSON_FILE
@click.option("--html", "html_path", type=click.Path(dir_okay=False), help="Write a page that needs no network here.")
@click.option(
    "--top", default=5, show_default=True, type=click.IntRange(0), help="Refusals, and steps a graph; 0: all."
)
@click.option("--detail/--brief", default=None, help="Every operator of every kernel (default: of small programs).")
@click.option(
    "--reproduce", "repro_path", type=click.Path(), help="Write a Python file that runs a graph or kernel alone."
)
@click.option("--kernel", type=click.IntRange(0), help="With --reproduce: this step of the graph.")
@click.option("--graph", type=click.IntRange(0), help="With --reproduce: this graph (default: 0).")
@click.option("--values", is_flag=True, help="With --reproduce: the very arguments, not others like them.")
@_OPTIONS
@debug_option(expose=True)
def explain(
    file: str,
    train: bool,
    target: str | None,
    json_path: str | None,
    html_path: str | None,
    top: int,
    detail: bool | None,
    repro_path: str | None,
    kernel: int | None,
    graph: int | None,
    values: bool,
    options: tuple[str, ...],
    debug: bool,
) -> NoReturn:
    """Say what plait fuses in FILE, what it does not and why, and what that costs. FILE defines make() -> (fn, args).

    --reproduce names a file for one graph (or, with --kernel, one kernel), or a folder for a file of every graph and kernel."""
    from plait.tools.explain import run
    from plait.tools.reproduce import Wanted

    if repro_path is None and (kernel is not None or graph is not None or values):
        raise click.UsageError("--kernel, --graph and --values say what --reproduce writes: name a file with it")
    wanted = None if repro_path is None else Wanted(repro_path, kernel, graph, values)
    given = _options(options)
    sys.exit(
        run(
            file,
            train=train,
            target=target,
            json_path=json_path,
            html_path=html_path,
            top=top,
            detail=detail,
            options=given,
            debug=debug,
            wanted=wanted,
        )
    )


@main.command()
@click.argument("old")
@click.argument("new")
@click.option("--all", "everything", is_flag=True, help="All that changed, however long; of bench every row.")
@_AS_JSON
@debug_option()
def compare(old: str, new: str, everything: bool, as_json: bool) -> NoReturn:
    """Say what changed between two files that explain, or bench, wrote with --json.

    Exit codes: 0 nothing got worse; 1 something did: launches, traffic, predicted time, memory, fallbacks or breaks, a step's spills, failure or
    measured time; of bench a time beyond the spread, a verdict, fallbacks or memory; 2 a file is at fault."""
    from plait.tools.compare import run

    sys.exit(run(old, new, everything=everything, json_wanted=as_json))


@main.command()
@click.argument("file", required=False)
@click.option("--train", is_flag=True, help="Gradients too, of every float argument and parameter.")
@_SEEDS
@click.option(
    "--self-test", is_flag=True, help="Without FILE: plant known faults in programs of its own; all must be caught."
)
@_JSON_FILE
@_OPTIONS
@debug_option(expose=True)
@click.pass_context
def verify(
    ctx: click.Context,
    file: str | None,
    train: bool,
    seeds: int,
    self_test: bool,
    json_path: str | None,
    options: tuple[str, ...],
    debug: bool,
) -> NoReturn:
    """Judge FILE compiled against eager and float64, and say where it first departs. FILE defines make() -> (fn, args).

    Exit codes: 0 right, 1 wrong, 2 the file or the program itself is at fault. With --self-test: 0 every planted fault was
    caught, 1 one was not."""
    given = _options(options)
    if self_test:
        named = [p for p in ctx.command.params if p.name in ("file", "train", "seeds")]
        asked = [
            p.make_metavar(ctx) if isinstance(p, click.Argument) else p.opts[0] for p in named if _is_typed(ctx, p)
        ]
        if asked:
            raise click.UsageError(f"--self-test brings programs of its own: leave out {' and '.join(asked)}", ctx)
        from plait.tools.selftest import run as run_self_test

        sys.exit(run_self_test(json_path=json_path, options=given, debug=debug))
    if file is None:
        raise click.UsageError("Missing argument 'FILE' (or --self-test).", ctx)
    from plait.tools.verify import run

    sys.exit(run(file, train=train, seeds=seeds, json_path=json_path, options=given, debug=debug))


@main.command()
@click.argument("file")
@click.option(
    "--slow", is_flag=True, help="Find the decision that costs most time, instead of one that makes it wrong."
)
@click.option("--train", is_flag=True, help="With the backward.")
@_SEEDS
@click.option("--folder", type=click.Path(file_okay=False), help="Of the repro (default: plait_bisect/NAME).")
@_JSON_FILE
@_OPTIONS
@debug_option(expose=True)
def bisect(
    file: str,
    slow: bool,
    train: bool,
    seeds: int,
    folder: str | None,
    json_path: str | None,
    options: tuple[str, ...],
    debug: bool,
) -> NoReturn:
    """Find the rewrite, merge or schedule that makes FILE wrong (or slow), and write the smallest program that shows it.

    A search that was broken off goes on. Exit codes: 0 nothing found, 1 found, 2 the file or the program is at fault."""
    from plait.tools.verify import run_bisect

    given = _options(options)
    sys.exit(
        run_bisect(
            file, slow=slow, train=train, seeds=seeds, folder=folder, json_path=json_path, options=given, debug=debug
        )
    )


@main.command()
@click.argument("file")
@click.option(
    "--budget", type=click.FloatRange(0, min_open=True), help="Seconds after which no build or timing begins."
)
@click.option("--train", is_flag=True, help="With the backward, from the sum of the results.")
@click.option("--out", "out_path", type=click.Path(dir_okay=False), help="Write this program's choices here as well.")
@_JSON_FILE
@_OPTIONS
@debug_option(expose=True)
def tune(
    file: str,
    budget: float | None,
    train: bool,
    out_path: str | None,
    json_path: str | None,
    options: tuple[str, ...],
    debug: bool,
) -> NoReturn:
    """Time the builds of each kernel of FILE that has several, and remember the fastest. FILE defines make() -> (fn, args).

    What is known is not timed again, so a run that its budget or Ctrl-C ended goes on. The file of --out is for the option tuned."""
    from plait.tools.tune import run

    given = _options(options)
    sys.exit(run(file, train=train, budget=budget, out_path=out_path, json_path=json_path, options=given, debug=debug))


@main.command()
@_AS_JSON
@debug_option()
def doctor(as_json: bool) -> NoReturn:
    """Say what this machine has and lacks for plait, with the remedy, and run one kernel."""
    from plait.tools.doctor import run

    sys.exit(run(as_json))


@main.group()
def cache() -> None:
    """The disk cache of compiled kernels: where, how large, tidy up."""


@cache.command("path")
@_AS_JSON
@debug_option()
def cache_path(as_json: bool) -> None:
    """Print the cache's folder; "off" where there is none."""
    from plait.tools import cache_commands

    folder = cache_commands.folder()
    if as_json:
        _print_json("path", {"folder": folder})
    else:
        click.echo(folder or "off")


@cache.command("stats")
@_AS_JSON
@debug_option()
def cache_stats(as_json: bool) -> None:
    """Entries, size, and limit."""
    from plait.tools import cache_commands

    found = cache_commands.stats()
    if as_json:
        _print_json("stats", found)
    else:
        for name, value in found.items():
            click.echo(f"{name:12s} {value}")


@cache.command("prune")
@click.option("--limit-mb", type=click.IntRange(0), help="Size to shrink to (default: the option cache_mb).")
@_AS_JSON
@debug_option()
def cache_prune(limit_mb: int | None, as_json: bool) -> None:
    """Remove the entries used longest ago, down to the size limit."""
    _say_removed("prune", limit_mb, as_json)


@cache.command("clear")
@_AS_JSON
@debug_option()
def cache_clear(as_json: bool) -> None:
    """Remove every entry."""
    _say_removed("clear", 0, as_json)


def _say_removed(command: str, limit_mb: int | None, as_json: bool) -> None:
    from plait.tools import cache_commands

    removed = cache_commands.prune(limit_mb)
    if as_json:
        _print_json(command, {"removed": removed})
    else:
        click.echo(f"{removed} entries removed")


@cache.command("verify")
@_AS_JSON
@debug_option()
def cache_verify(as_json: bool) -> NoReturn:
    """Check every entry; bad ones are moved to quarantine, and the exit code is 1."""
    from plait.tools import cache_commands

    good, bad = cache_commands.verify()
    if as_json:
        _print_json("verify", {"sound": good, "bad": bad})
    else:
        click.echo(f"{good} sound, {bad} bad")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
