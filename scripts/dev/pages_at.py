"""Does every page of the site fit its window? Measured in Chromium, at the widths of a phone and of a desktop.

    .venv/bin/mkdocs build --strict
    python scripts/dev/pages_at.py build/site                       # 400 and 1200 pixels
    python scripts/dev/pages_at.py build/site --pictures DIR        # and DIR/WIDTH/PAGE.png, to look at

For each page that is wider than its window, prints the elements that reach beyond it. Elements inside a box that
scrolls (tables, code) do not count. Exit status 1 if a page does not fit.
"""

import argparse
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
).split()
HEIGHT, TALLEST = 900, 12000  # of a window, and of a picture
HARNESS = "fits.html"
# A frame may be narrower than the narrowest window of the browser.
FRAME = '<iframe src="{}" style="border: 0; width: {}px; height: {}px"></iframe>'
MEASURE = """<script>
function measure(frame) {
  const page = frame.contentDocument, root = page.documentElement, width = root.clientWidth;
  page.querySelectorAll("details").forEach(details => details.open = true);
  page.querySelectorAll(".tabbed-block").forEach(tab => tab.style.display = "block");
  const cut = element => {
    for (let box = element.parentElement; box && box !== page.body && box !== root; box = box.parentElement)
      if (getComputedStyle(box).overflowX !== "visible") return true;
    return false;
  };
  const beyond = [...page.body.querySelectorAll("*")].filter(element => {
    const place = element.getBoundingClientRect();
    return place.width > 0 && place.right > width + 1 && !cut(element);
  });
  const name = element => element.localName + [...element.classList].map(word => "." + word).join("");
  return {
    width: width, wide: root.scrollWidth, height: root.scrollHeight,
    beyond: beyond.map(element => `${name(element)}, to ${Math.round(element.getBoundingClientRect().right)}: ` +
      element.textContent.trim().replace(/\\s+/g, " ").slice(0, 60)),
  };
}
addEventListener("load", () => {
  const measured = [...document.querySelectorAll("iframe")].map(measure);
  document.body.dataset.measured = JSON.stringify(measured);
});
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """The files of a folder, and `harness`: pages by path. Says nothing."""

    def __init__(self, *arguments, harness: dict[str, str], **options) -> None:
        self.harness = harness
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        page = self.harness.get(self.path)
        if page is None:
            return super().do_GET()
        content = page.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass


@contextmanager
def serving(site: Path, harness: dict[str, str]):
    """The address of a server of the site, and of the pages in `harness`, for the programs of this machine."""
    handler = functools.partial(Handler, directory=str(site), harness=harness)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def browse(browser: str, address: str, *options: str) -> str:
    """What the browser prints when it is given this address."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *OPTIONS, f"--user-data-dir={profile}", *options, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def measure(browser: str, site: Path, pages: list[str], width: int) -> dict[str, dict]:
    """For each page: width of its window and of its content, height, and the elements beyond the window."""
    frames = "".join(FRAME.format(f"/{page}", width, HEIGHT) for page in pages)
    with serving(site, {f"/{HARNESS}": f"<!DOCTYPE html>{MEASURE}<body>{frames}"}) as address:
        dom = browse(browser, f"{address}/{HARNESS}", "--dump-dom")
    found = re.search(r'data-measured="([^"]*)"', dom)
    if found is None:
        raise SystemExit(f"{browser} has not loaded the pages of {site}")
    return dict(zip(pages, json.loads(html.unescape(found[1])), strict=True))


def photograph(browser: str, site: Path, page: str, width: int, height: int, picture: Path) -> None:
    """Write a picture of the whole page, or of its top if it is very long."""
    height = min(height, TALLEST)
    picture.parent.mkdir(parents=True, exist_ok=True)
    frame = f'<!DOCTYPE html><body style="margin: 0">{FRAME.format(f"/{page}", width, height)}'
    with serving(site, {f"/{HARNESS}": frame}) as address:
        size = f"--window-size={width},{height}"
        browse(browser, f"{address}/{HARNESS}", size, f"--screenshot={picture.absolute()}")


def too_wide(page: str, measured: dict) -> list[str]:
    """Lines about a page that does not fit; none if it fits."""
    if measured["wide"] <= measured["width"] and not measured["beyond"]:
        return []
    head = f"{page}: {measured['wide']} pixels wide in a window of {measured['width']}"
    return [head, *(f"  {line}" for line in measured["beyond"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, metavar="SITE", help="folder that mkdocs has written")
    parser.add_argument("--widths", type=int, nargs="+", default=[400, 1200], metavar="PIXELS")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also write pictures of all pages")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("no Chromium is installed (Debian: apt install chromium)")
    pages = sorted(path.relative_to(options.site).as_posix() for path in options.site.rglob("*.html"))
    if not pages:
        raise SystemExit(f"{options.site} has no pages: run mkdocs build first")
    lines = []
    for width in options.widths:
        for page, measured in measure(browser, options.site, pages, width).items():
            lines += too_wide(page, measured)
            if options.pictures:
                name = page.removesuffix("index.html").strip("/").removesuffix(".html").replace("/", "-") or "index"
                picture = options.pictures / str(width) / f"{name}.png"
                photograph(browser, options.site, page, width, measured["height"], picture)
    print("\n".join(lines) or f"{len(pages)} pages fit at {', '.join(map(str, options.widths))} pixels")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
