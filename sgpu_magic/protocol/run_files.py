"""Names of files in a run's directory that more than one program knows."""

from __future__ import annotations

PAYLOAD = "payload.bin"
KEY = "key"
EVENTS = "events.msgpack"
TRACKING = "tracking.json"
REQUIREMENTS = "requirements.txt"
