"""Records as JSON text: whole structs in a `body` column, beside the columns that are searched.

Sets and mappings are written in sorted order, so that one record has one text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.node import Node
from shoal.model.people import Project, Token, User
from shoal.model.service import Release, Replica, Service
from shoal.model.window import Window

_encode = msgspec.json.Encoder(order="deterministic").encode


def encode(record: Any) -> str:
    return _encode(record).decode()


decode_job = msgspec.json.Decoder(Job).decode
decode_attempt = msgspec.json.Decoder(Attempt).decode
decode_node = msgspec.json.Decoder(Node).decode
decode_user = msgspec.json.Decoder(User).decode
decode_project = msgspec.json.Decoder(Project).decode
decode_token = msgspec.json.Decoder(Token).decode
decode_window = msgspec.json.Decoder(Window).decode
decode_service = msgspec.json.Decoder(Service).decode
decode_release = msgspec.json.Decoder(Release).decode
decode_replica = msgspec.json.Decoder(Replica).decode
decode_data = msgspec.json.Decoder(dict[str, Any]).decode
