"""Arguments of a command line to settings, by the pinned list of a parser: which values follow which argument.

What is no argument of the list is unknown, its values with it. An argument that is given twice counts as given last,
as argparse has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from results.launchers.names import Argument
from results.launchers.open_words import open_names
from results.launchers.settings import Setting, Value
from results.launchers.shell import Command, Script, read_script

__all__ = ["Arguments", "launch_of", "read_arguments", "written"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Settings by the parser's own names; `before`: words of the launcher in front of them."""

    settings: dict[str, Setting]
    unknown: tuple[str, ...]
    before: tuple[str, ...]
    repeated: tuple[str, ...]  # sentences about arguments that are given twice
    open_words: tuple[str, ...]  # variables that may hold arguments of their own


def launch_of(text: str, known: Mapping[str, Argument], source: str, defined: Mapping[str, str]) -> tuple[
    Script, Command
]:  # fmt: skip
    """The one command of a script, or of a bare list of arguments, that launches training."""
    try:
        script = read_script(text, defined)
    except RecursionError:
        raise ValueError(f"{source}: nested too deep for a launch script; write its words out") from None
    lines = [command for command in script.commands if command.words[0].startswith("-")]
    bare = Command(
        words=tuple(w for c in lines for w in c.words), lines=tuple(n for c in lines for n in c.lines)
    )  # one argument a line
    quiet = {"echo", "printf", "cat", "test", "[", "[["}
    launches = [c for c in script.commands if c.words[0] not in quiet and c.words[0][0:1] != "-" and _count(c, known)]
    if bare.words and _count(bare, known):
        launches.append(bare)
    most = max((_count(c, known) for c in launches), default=0)
    found = [c for c in launches if _count(c, known) * 2 > most]
    if not found:
        raise ValueError(f"{source}: holds no launch: no argument of {len(known)} known ones stands in it")
    if len(found) > 1:
        where = ", ".join(str(c.line) for c in found)
        raise ValueError(f"{source}: must launch one job, but lines {where} launch one each; keep one of them")
    return script, found[0]


def _count(command: Command, known: Mapping[str, Argument]) -> int:
    return sum(word.partition("=")[0] in known for word in command.words)


def read_arguments(command: Command, known: Mapping[str, Argument], source: str) -> Arguments:
    """The arguments of a launch."""
    settings: dict[str, Setting] = {}
    unknown: list[str] = []
    repeated: list[str] = []
    holes: list[str] = []
    words, lines = _before_redirection(command)
    first = _program(words)
    at = first
    while at < len(words):
        name, equals, joined = words[at].partition("=")
        place, argument = f"{source}:{lines[at]}", known.get(name)
        if not name.startswith("-") or _is_number(words[at]):
            names = open_names(words[at])
            holes += names
            unknown += [] if names else [words[at]]
            at += 1
            continue
        values, following = ([joined], at + 1) if equals else _following(words, at + 1, argument)
        if argument is None:
            unknown.append(name)
        else:
            value = _value(argument, name, values, place)
            if argument.dest in settings and settings[argument.dest].value != value:
                repeated.append(f"{name} is given twice: the last counts, as the parser has it")
            settings[argument.dest] = Setting(value=value, spelling=name, place=place)
        at = following
    return Arguments(
        settings=settings,
        unknown=tuple(dict.fromkeys(unknown)),
        before=tuple(words[:first]),
        repeated=tuple(repeated),
        open_words=tuple(dict.fromkeys(holes)),
    )


def _before_redirection(command: Command) -> tuple[list[str], list[int]]:
    end = next((i for i, w in enumerate(command.words) if set(w) <= set("<>|&") and w), len(command.words))
    return list(command.words[:end]), list(command.lines[:end])


def _program(words: Sequence[str]) -> int:
    """Where the program's own arguments start: after its file, or at once in a bare list."""
    files = [i for i, w in enumerate(words) if w.endswith((".py", ".sh")) and not w.startswith("-")]
    if files:
        return files[0] + 1
    modules = [i for i, w in enumerate(words[:-1]) if w == "-m" and "distributed" not in words[i + 1]]
    return modules[-1] + 2 if modules else 0


def _following(words: Sequence[str], at: int, argument: Argument | None) -> tuple[list[str], int]:
    """The values behind an argument. Behind an unknown one: all up to the next."""
    kind = "list" if argument is None else argument.kind
    most = {"on": 0, "off": 0, "switch": 0, "value": 1, "list": len(words)}.get(kind)
    if most is None:
        most = int(kind.removeprefix("value"))
    end = at
    while end < len(words) and end - at < most and (not words[end].startswith("-") or _is_number(words[end])):
        end += 1
    return list(words[at:end]), end


def _value(argument: Argument, name: str, values: list[str], place: str) -> Value:
    if argument.kind in {"on", "off", "switch"}:
        if values:
            raise ValueError(f"{place}: {name} takes no value, but got {values[0]!r}; leave it out")
        return argument.kind == "on" or (argument.kind == "switch" and not name.startswith("--no-"))
    if not values and argument.kind != "list":
        raise ValueError(f"{place}: {name} must be followed by a value, but the next word is another argument")
    return values[0] if argument.kind == "value" else list(values)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def written(argument: Argument, value: object) -> list[str]:
    """The words that say `value`; none where it is the switch's other state."""
    spelling = argument.spellings[0]
    if argument.kind in {"on", "off"}:
        return [spelling] if value == (argument.kind == "on") else []
    if isinstance(value, list):
        return [spelling, *map(str, value)]
    return [spelling, f"{value:g}" if isinstance(value, float) else str(value)]
