"""Opens an HTML file in Chromium's engine and says what a person would see of it, as JSON.

    python tests/launch/flight/browser.py report.html picture.png

Qt brings the engine as a wheel (PySide6_WebEngine), so that no browser has to be installed. The
page is loaded, looked at, zoomed with the wheel, moved with the pointer, and painted to a picture.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Without a screen, a graphics card, or a user of its own to be put into a sandbox with.
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--disable-gpu --no-sandbox --single-process"

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

SECONDS = 60

LOOK = """
(() => {
  const plot = document.querySelector(".plot"), svg = document.querySelector("svg");
  const area = plot.getBoundingClientRect();
  const ticks = () => [...document.querySelectorAll(".axis span")].map(t => t.textContent);
  const at = (name, more) => {
    const kind = name === "wheel" ? WheelEvent : PointerEvent;
    plot.dispatchEvent(new kind(name, { bubbles: true, cancelable: true, ...more }));
  };
  const parts = [...svg.querySelectorAll("rect")].map(part => {
    const box = part.getBoundingClientRect();
    const found = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    return { kind: part.className.baseVal, width: box.width, height: box.height,
      colour: getComputedStyle(part).fill, text: part.querySelector("title").textContent,
      seen: found === part, row: Math.floor((box.y - area.y) / (area.height / RANKS)) };
  });
  const seen = { title: document.title, heading: document.querySelector("h1").innerText,
    ranks: [...document.querySelectorAll(".rank")].map(r => r.innerText), parts, ticks: [ticks()],
    tables: [...document.querySelectorAll("table")].map(t => t.innerText),
    wide: document.documentElement.scrollWidth > innerWidth };
  at("wheel", { clientX: area.x + area.width / 2, deltaY: Math.log(0.5) / 0.002 });
  seen.ticks.push(ticks());
  at("pointerdown", { clientX: area.x + 100 });
  at("pointermove", { clientX: area.x + 100 - area.width / 10 });
  at("pointerup", {});
  seen.ticks.push(ticks());
  at("dblclick", {});
  seen.ticks.push(ticks());
  return JSON.stringify(seen);
})()
""".replace("RANKS", "document.querySelectorAll('.rank').length")


def main(page: Path, picture: Path) -> None:
    """Load `page`, print what LOOK found as one JSON line, save a picture of it."""
    app = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(1200, 900)

    def looked(seen: str) -> None:
        print(seen, flush=True)
        # One frame later the double click's effect is painted.
        QTimer.singleShot(300, lambda: (view.grab().save(str(picture)), app.quit()))

    def loaded(right: bool) -> None:
        if not right:
            print(json.dumps({"failed": str(page)}), flush=True)
            app.exit(1)
        view.page().runJavaScript(LOOK, 0, looked)

    view.loadFinished.connect(loaded)
    view.load(QUrl.fromLocalFile(str(page.resolve())))
    view.show()
    QTimer.singleShot(SECONDS * 1000, lambda: app.exit(2))
    sys.exit(app.exec())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
