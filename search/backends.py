"""Cost backends that installed packages bring, by the entry point group `trainspace.cost_backends`.

Loaded once, before anything is priced, in every process that prices. docs/fusion.md says what one must have.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from estimator.cost.asked import Asked
from estimator.cost.price import BACKENDS, Confidence, register

__all__ = ["GROUP", "load_backends"]

GROUP = "trainspace.cost_backends"
NEEDS = ("name", "priority", "covers", "seconds")
OURS = tuple(backend.name for backend in BACKENDS)


@lru_cache(maxsize=1)
def load_backends() -> tuple[str, ...]:
    """Puts them into the chain; their names. ValueError names the one that cannot be used."""
    found: dict[str, str] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        backend = _made(point)
        if backend.name in found:
            law = f"{GROUP}: two cost backends must not have one name, but {point.value} and {found[backend.name]} have"
            raise ValueError(f"{law} {backend.name!r}; uninstall one")
        found[backend.name] = point.value
        register(backend)
    return tuple(found)


def _made(point: EntryPoint) -> Asked:
    where = f"{GROUP}: {point.name} = {point.value}"
    try:
        inner = point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where} cannot be loaded ({error}); mend or uninstall it") from error
    inner = inner() if isinstance(inner, type) else inner
    missing = [name for name in NEEDS if not hasattr(inner, name)]
    if missing:
        raise ValueError(f"{where} must have {', '.join(NEEDS)}, but lacks {missing[0]}; see docs/fusion.md")
    if not isinstance(inner.name, str) or not inner.name.isidentifier() or inner.name in OURS:
        law = f"must have a name of letters, digits and _, and none of {', '.join(OURS)}"
        raise ValueError(f"{where} {law}, but has {inner.name!r}")
    if type(inner.priority) is not int:
        raise ValueError(f"{where} must have a whole number as its priority, but has {inner.priority!r}")
    words = [level.value for level in Confidence]
    word = getattr(inner, "confidence", Confidence.MEDIUM.value)
    if word not in words:
        raise ValueError(f"{where} must have a confidence of {', '.join(words)}, but has {word!r}")
    return Asked(inner, inner.name, inner.priority, Confidence(word))
