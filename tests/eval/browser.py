"""Chromium without a window, driven over its pipe: what a page says, asks the network for, and computes."""

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Tab:
    """One page.

    Attributes:
        complaints: Console errors and warnings, and exceptions.
        requests: Addresses that were asked for.
    """

    def __init__(self, send: int, receive: int) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._send, self._receive = send, receive
        self._number, self._rest = 0, b""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.as_uri())
        self.evaluate("document.readyState === 'complete' || new Promise(done => addEventListener('load', done))")

    def evaluate(self, expression: str) -> Any:
        """Value of an expression, or of what it promises."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._send, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                more = os.read(self._receive, 1 << 20)
                assert more, "the browser has gone"
                self._rest += more
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event.get("method") == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(str(parameters["args"]))


@contextmanager
def tab(program: str, folder: Path) -> Iterator[Tab]:
    """A page of a browser that knows no network and keeps its files in ``folder``."""
    (read, send), (receive, write) = os.pipe(), os.pipe()
    options = (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--mute-audio",
        "--autoplay-policy=no-user-gesture-required", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--disable-dev-shm-usage", "--disable-background-networking", "--remote-debugging-pipe",
    )  # fmt: skip
    # The browser reads from descriptor 3 and writes to 4.
    script = f'exec "$0" "$@" 3<&{read} 4>&{write}'
    given = ["bash", "-c", script, program, *options, f"--user-data-dir={folder}"]
    process = subprocess.Popen(given, pass_fds=(read, write), stderr=subprocess.DEVNULL)
    os.close(read)
    os.close(write)
    try:
        yield Tab(send, receive)
    finally:
        process.terminate()
        process.wait(30)
        os.close(send)
        os.close(receive)
