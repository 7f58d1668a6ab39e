"""Things to do to JSON and to bytes."""

import json
import random

VALUES = [None, True, -1, 0, 1, 2**31, 2**70, 0.5, -1e300, "", "x", "x" * 5000, "[bold]", "\ud800", "../..", "nan"]
VALUES += [[], {}, [[]], [None], {"": None}]


def places(value, path=()):
    """Paths to everything in a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def mutate_value(value, rng: random.Random) -> str:
    """Change one place of a JSON object; what was done."""
    path = rng.choice([p for p in places(value) if p])
    for key in path[:-1]:
        value = value[key]
    key, where = path[-1], ".".join(map(str, path))
    what = rng.choice(["remove", "replace", "replace", "wrap", "rename"])
    if what == "remove" or (what == "rename" and isinstance(value, list)):
        del value[key]
    elif what == "replace":
        value[key] = rng.choice(VALUES)
        return f"{where} = {str(value[key])[:20]!a}"
    elif what == "wrap":
        value[key] = [value[key]]
    else:
        value[f"{key}x"] = value.pop(key)
    return f"{what} {where}"


def mutate_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Damage a file as disks, copies and people do; what was done."""
    at = rng.randrange(max(1, len(content)))
    bit = bytes([content[at] ^ 1 << rng.randrange(8)]) if content else b""
    kinds = {
        f"cut at {at}": content[:at],
        "empty": b"",
        f"bit of byte {at}": content[:at] + bit + content[at + 1 :],
        f"zeros from {at}": content[:at] + bytes(min(512, len(content) - at)) + content[at + 512 :],
        "header": rng.randbytes(8) + content[8:],
        "huge header": (2**63 - 1).to_bytes(8, "little") + content[8:],
        "appended": content + b"\0" * 7,
        "rubbish": rng.randbytes(64),
        "text": b"<html>404</html>",
    }
    what = rng.choice(sorted(kinds))
    return kinds[what], what


def mutate_json(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change one to three values, or what the text is."""
    if rng.random() < 0.2:
        text = rng.choice(
            [b"[]", b"5", b"null", b"{}", b"\xff\xfe{}", b'{"a": ' * 5000, b'{"a": NaN}', b'{"a": 1}{"b": 2}']
        )
        return text, repr(text[:20])
    value = json.loads(content)
    done = [mutate_value(value, rng) for _ in range(rng.choice([1, 1, 2, 3])) if value]
    return json.dumps(value).encode(), "; ".join(done)
