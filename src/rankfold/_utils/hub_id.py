"""What names a repository of the hub."""

import re

_OWNER_NAME = re.compile(r"[^/.~][^/]*/[^/]+")


def is_hub_id(name: str) -> bool:
    """Tell whether a name has the form ``owner/name``: not a path from here, from the root or from home."""
    return _OWNER_NAME.fullmatch(name) is not None
