"""Plain values as YAML that our own reader reads back: the one writer of spaces and configurations."""

from __future__ import annotations

import yaml

from search.yaml_lines import Plain, parse_scalar

__all__ = ["yaml_text"]


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our reader would take for something else; writes no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(parse_scalar(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(content: dict[str, Plain]) -> str:
    r"""One document, keys in the order given.

    >>> yaml_text({"model": "llama3_8b", "strategy": {"schedule": "1f1b", "precision": "25e6"}})
    "model: llama3_8b\nstrategy:\n  schedule: 1f1b\n  precision: '25e6'\n"
    """
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
