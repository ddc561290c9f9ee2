"""The form of a checkpoint's manifest, written independently of the package."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def sealed(entries: dict[str, Any]) -> bytes:
    """A manifest with these entries, and the SHA-256 of all others in place of the one that it had."""
    others = {name: value for name, value in entries.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**others, "sha256": digest}, sort_keys=True, indent=1) + "\n").encode()
