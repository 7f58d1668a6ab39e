"""Chromium without a window, driven through the pipe of its DevTools protocol: no driver and no package is needed."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. Commands are written to descriptor 3 of Chromium and answers read from 4, each ended by a zero byte."""

    def __init__(self, folder: Path, width: int, height: int):
        inner_read, self._write = os.pipe()
        self._read, inner_write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        flags += ["--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        line = f'exec "$0" "$@" 3<&{inner_read} 4>&{inner_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, str(CHROMIUM), *flags],
            pass_fds=(inner_read, inner_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(inner_read)
        os.close(inner_write)
        self._count, self._left, self._session = 0, b"", {}
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def send(self, method: str, **parameters) -> dict:
        """Send a command and return its result."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self) -> bytes:
        while b"\0" not in self._left:
            part = os.read(self._read, 1 << 16)
            assert part, "chromium ended"
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return message

    def run(self, script: str):
        """Return the value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 240):
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"{script} stayed false; the page: {self.run('document.body.innerText')}"
            time.sleep(0.3)
        return value

    def picture(self, file: Path) -> None:
        """Write a picture of the page."""
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End Chromium."""
        self._process.terminate()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
