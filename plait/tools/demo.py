"""`plait demo`: a real sentence-embedding model in eager, under plait and under Inductor, side by side.

Reading the text needs no torch, so that a wrong file name is answered at once; the rest is in `demo_run`.
"""

from __future__ import annotations

from pathlib import Path

from plait.errors import UserError

MAX_SENTENCES, MAX_CHARACTERS = 512, 2000


def read_sentences(file: str | None) -> list[str]:
    """Sentences of a UTF-8 text, one a line, empty lines left out; the project's own sample without a file."""
    path = Path(file) if file is not None else Path(__file__).with_name("sample.txt")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "name a text with one sentence a line, or none for the sample"
        raise UserError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", hint="convert it: iconv -t UTF-8") from error
    sentences = [" ".join(row.split()) for row in text.splitlines() if row.strip()]
    if len(sentences) < 2:
        raise UserError(f"{path} has {len(sentences)} sentences, two are needed", hint="one sentence a line")
    if len(sentences) > MAX_SENTENCES:
        raise UserError(f"{path} has {len(sentences)} sentences, more than {MAX_SENTENCES}", hint="split the file")
    if max(map(len, sentences)) > MAX_CHARACTERS:
        raise UserError(f"{path} has a line of more than {MAX_CHARACTERS} characters", hint="one sentence a line")
    return sentences


def run(sentences: list[str], *, top: int, threads: int | None, backend: str, as_json: bool) -> int:
    """Embed, compare, print; 0 when plait's embeddings are right, 1 when they are not."""
    from plait.tools.demo_run import demo

    return demo(sentences, top=top, threads=threads, backend=backend, as_json=as_json)
