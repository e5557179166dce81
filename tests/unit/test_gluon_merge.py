"""Two texts of a tile as one with branches (emit/gluon_merge)."""

from __future__ import annotations

from plait.emit.gluon_merge import merged


def lines(text: str) -> list[str]:
    return ["    " + line.strip() for line in text.strip().splitlines()]


def test_what_differs_stands_in_branches() -> None:
    cut = lines("""a = x + 1
        m = a > 0
        b = where(m, a, low)
        return b""")
    whole = lines("""a = x + 1
        b = a
        return b""")
    assert merged(cut, whole, "cut") == [
        "    a = x + 1",
        "    if cut:",
        "        m = a > 0",
        "        b = where(m, a, low)",
        "    else:",
        "        b = a",
        "    return b",
    ]


def test_a_mask_is_formed_again_where_it_is_needed_again() -> None:
    cut = lines("""m = r < 9
        b = where(m, a, low)
        c = f(b)
        d = where(m, c, 0)
        return d""")
    whole = lines("""b = a
        c = f(b)
        d = c
        return d""")
    out = merged(cut, whole, "cut")
    assert out is not None
    assert out.count("        m = r < 9") == 2
    assert out.count("    if cut:") == 2


def test_a_mask_of_a_later_branch_makes_none_of_its_own() -> None:
    cut = lines("""m = r < 9
        c = f(a)
        d = where(m, c, 0)
        return d""")
    whole = lines("""c = f(a)
        d = c
        return d""")
    out = merged(cut, whole, "cut")
    assert out is not None
    assert out[0] == "    c = f(a)" and out.count("    if cut:") == 1


def test_what_only_one_side_has_cannot_leave_its_branch() -> None:
    cut = lines("""m = r < 9
        d = f(m)
        return d""")
    whole = lines("""d = f(m)
        return d""")
    assert merged(cut, whole, "cut") is None


def test_what_changes_is_not_formed_again() -> None:
    cut = lines("""m = acc1 < 9
        b = where(m, a, low)
        return b""")
    whole = lines("""b = a
        return b""")
    assert merged(cut, whole, "cut") is None
