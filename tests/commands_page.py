"""docs/commands.md, made from the commands themselves: `python -m tests.commands_page > docs/commands.md` in the checkout."""

from __future__ import annotations

from collections.abc import Iterator

import click

from plait.tools.cli import main
from plait.tools.group import EXIT_CODES

HEAD = """# Commands

Made from the commands themselves (`python -m tests.commands_page > docs/commands.md`; a test holds the two together). `plait COMMAND --help` says the same.

FILE of explain, verify, bisect and tune is a Python file with a `make()` that returns `(fn, args)`: the arguments of one call, or a list of tuples, each the arguments of one.

## Exit codes

| code | meaning |
|---:|---|
"""

ERRORS = """
## Errors

An error is one line that says what is wrong, why, and at which line of the program, and one that says what to do next. Both go to the error
stream, like progress; results go to the output. There is no traceback without `--debug`.

```
$ plait explain model.py --option numeric=eager
error: unknown option 'numeric'
  hint: did you mean 'numerics'? options: mode, numerics, rng, strict, ...
```

## JSON

Every command prints or writes its facts as JSON, whose first fields say what it is (`schema`) and in which form (`version`, which rises when a
field changes its meaning or goes; new fields may come). Numbers that are not finite are `null`.

| command | schema |
|---|---|
"""

SCHEMAS = {
    "explain": "plait/report/schema_1.json",
    "verify --self-test": "plait/tools/schemas/self_test_1.json",
    **{
        n: f"plait/tools/schemas/{n}_1.json"
        for n in ("compare", "verify", "bisect", "tune", "bench", "demo", "doctor", "cache")
    },
}
_OF = {
    "--option": "NAME=VALUE",
    "--json": "FILE",
    "--html": "FILE",
    "--out": "FILE",
    "--budget": "SECONDS",
    "--show": "FILE",
    "--folder": "FOLDER",
    "--only": "REGEX",
    "--peers": "NAMES",
}


def page() -> str:
    """The whole document."""
    codes = "".join(f"| {code} | {words} |\n" for code, words in EXIT_CODES.items())
    schemas = "".join(f"| `plait {name}` | `{path}` |\n" for name, path in SCHEMAS.items())
    return HEAD + codes + ERRORS + schemas + "".join(_of(path, c) for path, c in commands())


def commands(group: click.Group = main, path: str = "plait") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with its whole name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _of(path: str, command: click.Command) -> str:
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p.make_metavar(click.Context(command)) for p in shown if isinstance(p, click.Argument)]
    lines = [
        "",
        f"## {' '.join([path, *arguments])}",
        "",
        " ".join((command.help or "").split()),
        "",
        "| flag | what it does |",
        "|---|---|",
    ]
    for p in shown:
        if isinstance(p, click.Option):
            lines.append(f"| `{_flag(p)}` | {_cell(p.help or '')}{_default(p)} |")
    return "\n".join(lines) + "\n"


def _flag(p: click.Option) -> str:
    names = "`, `".join([*p.opts, *p.secondary_opts])
    if p.is_flag:
        return names
    kind = p.type
    of = (
        "|".join(map(str, kind.choices))
        if isinstance(kind, click.Choice)
        else _OF.get(p.opts[0], kind.name.partition(" ")[0].upper())
    )
    return _cell(f"{names} {of}")


def _default(p: click.Option) -> str:
    return f" (default: {p.default})" if p.show_default and p.default is not None else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
