"""Questions a user may ask, as YAML. This module only says where they are."""

from pathlib import Path

__all__ = ["MODELS", "SPACES"]

SPACES = Path(__file__).parent
MODELS = SPACES / "models"
