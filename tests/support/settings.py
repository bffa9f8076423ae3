"""Settings of servers under test, given by single fields."""

from __future__ import annotations

from typing import Any

import msgspec

from sylvan.config.tree import DisaggConfig
from sylvan.runtime.server.settings import ServerSettings

_SECTIONS = ("server", "text", "limits")
_PLAIN = ("served_model_name", "observe", "faults", "shown")


def settings_of(**given: Any) -> ServerSettings:
    """Return default settings, except for fields of `server`, `text` and `limits`, `role` and
    `switches_role`.
    """
    settings = ServerSettings(**{name: given.pop(name) for name in _PLAIN if name in given})
    sections: dict[str, Any] = {name: getattr(settings, name) for name in _SECTIONS}
    if "role" in given or "switches_role" in given:
        role, switchable = given.pop("role", None), given.pop("switches_role", False)
        sections["disagg"] = DisaggConfig(role=role, switchable=switchable)
    for name, value in given.items():
        section = next(s for s in _SECTIONS if name in sections[s].__struct_fields__)
        sections[section] = msgspec.structs.replace(sections[section], **{name: value})
    found = {name: getattr(settings, name) for name in _PLAIN}
    return ServerSettings(**found, **sections)
