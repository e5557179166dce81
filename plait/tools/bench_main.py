"""The bench without click: `python -m plait.tools.bench_main --suite kernels --device cuda ...`, the same flags as `plait bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from plait.errors import UserError
from plait.tools.bench import PEERS, SUITES, Job, run


def parse_options(pairs: Sequence[str]) -> dict[str, str]:
    """`name=value` pairs as the options that torch.compile passes on."""
    for p in pairs:
        if "=" not in p:
            raise UserError(f"--option {p!r} is not name=value", hint="for example --option numerics=eager")
    return dict(p.split("=", 1) for p in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run; the exit code is that of `bench.run`, 2 for a wrong command line."""
    p = argparse.ArgumentParser(
        prog="plait.tools.bench_main", description="Time the workloads against eager and Inductor."
    )
    p.add_argument("--suite", choices=SUITES, default="kernels")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--peers", default="eager,inductor", help=f"of {', '.join(PEERS)}; comma-separated")
    p.add_argument("--json", dest="json_path", help="write the rows here, after each one")
    p.add_argument("--only", help="regular expression on workload names")
    p.add_argument("--seconds", type=float, default=5.0, help="measuring time a workload")
    p.add_argument(
        "--train-steps", type=int, default=20, help="steps of the loss-curve check of training models; 0: none"
    )
    p.add_argument("--threads", type=int)
    p.add_argument("--option", action="append", default=[], help="name=value, passed to plait")
    p.add_argument(
        "--timeout", type=float, default=900.0, help="seconds without progress before a workload is given up"
    )
    p.add_argument("--commit", help="what is measured, where the files are no checkout")
    p.add_argument("--backend", default="plait", help=argparse.SUPPRESS)
    a = p.parse_args(arguments)
    try:
        job = Job(
            a.suite,
            a.device,
            tuple(x for x in a.peers.split(",") if x),
            a.json_path,
            a.only,
            a.seconds,
            a.backend,
            dict(parse_options(a.option)),
            a.train_steps,
            a.threads,
            a.timeout,
            a.commit,
        )
        return run(job)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
