"""What `plait cache` does, over the one cache that the options and the environment name. Free of torch."""

from __future__ import annotations

from typing import Any

from plait.errors import RuntimeFault
from plait.options import Options
from plait.runtime.cache import Cache, cache_for


def the_cache() -> Cache:
    """The usable cache; says clearly when there is none."""
    cache = cache_for(Options.make())
    if cache.folder is None:
        raise RuntimeFault("the disk cache is turned off", hint="unset PLAIT_CACHE, or set it to a folder")
    if not cache.usable:
        raise RuntimeFault(
            f"the disk cache at {cache.folder} cannot be used: {cache.stats.last_error}", hint="plait doctor"
        )
    return cache


def folder() -> str | None:
    """Where the cache is, whether or not it exists yet; None where it is turned off."""
    return cache_for(Options.make()).folder


def stats() -> dict[str, Any]:
    """What the cache holds."""
    found = the_cache().summary()
    return {k: found[k] for k in ("folder", "entries", "bytes", "limit_bytes", "in_quarantine")}


def prune(limit_mb: int | None) -> int:
    """Remove what was used longest ago, down to the limit (the option's, unless given); how many entries went."""
    cache = the_cache()
    if limit_mb == 0:
        return cache.clear()
    return cache.prune(None if limit_mb is None else limit_mb << 20)


def verify() -> tuple[int, int]:
    """Check every entry: how many are sound, and how many were not and are now in quarantine."""
    return the_cache().verify()
