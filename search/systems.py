"""Systems of a space: names, descriptions, files that `search calibrate` wrote, resolved ones; a list opens a choice.

`tables` beside a description brings measured operators of the chip. Knows nothing of models or strategies.
"""

from __future__ import annotations

import os
from pathlib import Path

from hardware.catalog import cluster, system_from_mapping
from hardware.system import SystemSpec
from search.axes import whole
from search.plain import from_plain
from search.yaml_lines import Document, Key, Plain, SpaceError, read_document

__all__ = ["beside", "read_systems", "refused"]

MAX_SYSTEMS = 1_000
MAX_CHIPS = 10**7
TABLES = "tables"


def read_systems(document: Document, folder: Path) -> tuple[SystemSpec, ...]:
    """Every system that is searched."""
    document = _with_files(document, folder)
    value = document.get(("system",))
    if value == []:
        raise document.error(("system",), "a list must not be empty", value, "at least one system")
    systems = [system for key in _keys(document) for system in _some_systems(document, key, folder)]
    if len(systems) > MAX_SYSTEMS:
        raise document.error(("system",), f"a space must have at most {MAX_SYSTEMS} systems", len(systems))
    return tuple(s for i, s in enumerate(systems) if s not in systems[:i])


def _keys(document: Document) -> list[Key]:
    """Where each entry of `system` stands."""
    value = document.get(("system",))
    return [("system", i) for i in range(len(value))] if isinstance(value, list) else [("system",)]


def _with_files(document: Document, folder: Path) -> Document:
    """The document with systems that are files replaced by what these hold: FILE.yaml, or {file: FILE.yaml, ...}."""
    for key in _keys(document):
        given = document.get(key)
        changes = {k: v for k, v in given.items() if k != "file"} if isinstance(given, dict) else {}
        name = given.get("file") if isinstance(given, dict) else given
        if not isinstance(name, str) or not (isinstance(given, dict) or name.endswith((".yaml", ".yml"))):
            continue
        file = beside(folder, name) or Path(name)
        if not os.path.isfile(file):
            raise document.error(key, "names a file that is not there", name, "a file that search calibrate -o wrote")
        document = document.with_document(key, read_document(file), changes)
    return document


def _some_systems(document: Document, key: Key, folder: Path) -> list[SystemSpec]:
    """One entry of `system`: a name, a description of hardware.catalog, or `{spec: every field}` of a resolved file."""
    value = document.get(key)
    try:
        if isinstance(value, str):
            return [cluster(value)]
        if isinstance(value, dict) and value:
            tables = _tables(document, (*key, TABLES), folder)
            plain = {name: item for name, item in value.items() if name != TABLES}
            found = [_one_system(document, key, plain, number) for number in _chips(document, (*key, "num_chips"))]
            return _bringing(found, tables)
    except SpaceError:
        raise
    except ValueError as error:
        raise refused(document, key, error) from None
    raise document.error(key, "must be a name or a mapping", value, "dgx_h100, {cluster: dgx_h100, num_chips: 512}")


def _tables(document: Document, key: Key, folder: Path) -> list[Path]:
    """Files and folders of measured operators: one, or a list."""
    value = document.get(key)
    names = value if isinstance(value, list) else [] if value is None else [value]
    found = []
    for name in names:
        if not isinstance(name, str):
            raise document.error(key, "must name files or folders of measured operators", name, "measured/")
        found.append(beside(folder, name) or Path(name))
    return found


def _bringing(systems: list[SystemSpec], tables: list[Path]) -> list[SystemSpec]:
    if not tables:
        return systems
    from search.op_times import with_tables  # reads files, which few spaces name

    return [with_tables(system, tables) for system in systems]


def _one_system(document: Document, key: Key, value: dict[str, Plain], num_chips: int | None) -> SystemSpec:
    if "spec" in value:
        system = from_plain(SystemSpec, document.mapping(key, ("spec",))["spec"], "spec")
    else:
        system = system_from_mapping(value if num_chips is None else {**value, "num_chips": num_chips})
    if system.num_chips > MAX_CHIPS:  # of all segments together
        raise document.error(key, f"must have at most {MAX_CHIPS} chips", system.num_chips, "fewer chips")
    return system


def _chips(document: Document, key: Key) -> list[int | None]:
    value = document.get(key)
    if value is None:
        return [None]
    if not isinstance(value, list):
        return [whole(document, key, value, 1, MAX_CHIPS)]
    if not 0 < len(value) <= MAX_SYSTEMS:
        raise document.error(key, f"must have 1 to {MAX_SYSTEMS} values", len(value))
    return [whole(document, (*key, i), item, 1, MAX_CHIPS) for i, item in enumerate(value)]


def refused(document: Document, key: Key, error: ValueError) -> SpaceError:
    """What a builder refused, at the key its message starts with if the document has that."""
    inner: Key = (*key, *str(error).split()[0].rstrip(":,").split("."))
    known = inner in document.places
    where = f"{document.place(inner if known else key)}: {'.'.join(map(str, key))}"
    return SpaceError(f"{where}: {' '.join(str(error).split())}")


def beside(folder: Path, name: str) -> Path | None:
    """What a name means beside a space, written without detours such as `spaces/../`; None where nothing is there."""
    joined = folder / name
    if not os.path.exists(joined):
        return None
    plain = os.path.normpath(joined)
    is_same = os.path.exists(plain) and os.path.samefile(plain, joined)  # not where a folder on the way is a link
    return Path(plain) if is_same else joined
