"""Images of rows: where they are read from, and what is refused before it can do harm."""

import base64
import functools
import http.server
import io
import threading

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.media import media_files
from tasks.runtime.data.media.image_files import ImageReader, open_picture, png_of
from tasks.runtime.data.reading.rows import Row, RowError, Skipped

RED = Image.new("RGB", (8, 6), (255, 0, 0))


def reader(**fields):
    return ImageReader(Data(source="rows.jsonl", **fields))


def row(folder=""):
    return Row("rows.jsonl line 7", {}, folder=str(folder))


def saved(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_gray_of_16_bits_keeps_its_shades(kind):
    """By the plain formula; Pillow's own conversion makes all but the darkest 255 shades white."""
    shades = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    picture = open_picture(saved(Image.fromarray(shades), kind))
    expected = np.round(shades / 65535 * 255)
    assert picture.mode == "RGB" and np.array_equal(np.asarray(picture), np.stack([expected] * 3, axis=-1))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_shades_of_32_bits_are_refused(dtype):
    """Pillow makes all three of these white."""
    content = saved(Image.fromarray(np.array([[300, 1000, 65535]], dtype)), "TIFF")
    assert np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).min() == 255
    with pytest.raises(ValueError, match=r"its shades have 32 bits .* save it with 8 or 16"):
        open_picture(content)


@pytest.fixture
def folder(tmp_path):
    RED.save(tmp_path / "red.png")
    return tmp_path


@pytest.mark.parametrize("how", ["relative", "absolute", "file url", "data url", "bytes", "datasets", "datasets path"])
def test_an_image_is_read_from_where_the_row_says(how, folder):
    content = (folder / "red.png").read_bytes()
    value = {
        "relative": "red.png",
        "absolute": str(folder / "red.png"),
        "file url": f"file://{folder}/red.png",
        "data url": f"data:image/png;base64,{base64.b64encode(content).decode()}",
        "bytes": content,
        "datasets": {"bytes": content, "path": "gone.png"},
        "datasets path": {"bytes": None, "path": "red.png"},
    }[how]
    read, picture = reader().read(value, row(f"file://{folder}"))
    assert read == content
    assert picture.getpixel((3, 3)) == (255, 0, 0)


def test_an_image_folder_stands_for_the_folder_of_the_file(folder):
    assert reader(image_folder=str(folder)).read("red.png", row("file:///elsewhere"))[1].size == (8, 6)


def test_an_image_is_read_from_a_server_and_a_path_relative_to_it(folder):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        for value, place in ((f"{url}/red.png", ""), ("red.png", url)):
            assert reader().read(value, row(place))[1].size == (8, 6)
        with pytest.raises(RowError, match=r"line 7: image 'none.png' cannot be read"):
            reader().read("none.png", row(url))
    finally:
        server.shutdown()
        server.server_close()


def test_an_image_in_a_store_is_read_by_the_client_that_reads_all_stores(monkeypatch):
    """Flyte 2's SDK would put its own in the place of fsspec's."""
    store = MemoryFileSystem()
    store.pipe("/bucket/red.png", png_of(RED))
    monkeypatch.setattr(media_files, "url_to_fs", lambda url: (store, url.removeprefix("s3:/")))
    for value, place in (("s3://bucket/red.png", ""), ("red.png", "s3://bucket")):
        assert reader().read(value, row(place))[1].size == (8, 6)


def test_an_image_of_too_many_bytes_is_refused(monkeypatch, folder):
    monkeypatch.setattr(media_files, "_LARGEST", 60)
    for value in ("red.png", (folder / "red.png").read_bytes()):
        with pytest.raises(RowError, match=r"line 7: image .* is larger than 0 MiB; make it smaller"):
            reader().read(value, row(folder))


@pytest.mark.parametrize(
    "value, place, problem",
    [
        (
            "gone.png",
            "file:///nowhere",
            "image 'gone.png' cannot be read: No such file or directory at '/nowhere/gone.png'; it is relative to "
            "data.image_folder",
        ),
        ("/nowhere/gone.png", "file:///data", "image '/nowhere/gone.png' cannot be read: No such file or directory$"),
        ("red.png", "", "set data.image_folder"),
        # Data from elsewhere names no files of this machine.
        ("/etc/hostname", "https://host/data", "is a file of this machine, but the data is elsewhere"),
        ("file:///etc/hostname", "s3://bucket/data", "is a file of this machine, but the data is elsewhere"),
        ("ftp://host/a.png", "", "the URL begins with none of file, http"),
        ("simplecache::http://host/a.png", "", "the URL begins with none of"),
        ("data:image/png", "", "has a comma before the data"),
        ("data:;base64,!!", "", "cannot be read"),
        (b"GIF89a nothing", "", "image bytes.*: "),
        (b"", "", r"no picture \(0 bytes\)"),
        (17, "", "a path, a URL or bytes, not int 17"),
    ],
)
def test_an_image_that_cannot_be_read_is_told_by_its_row(value, place, problem):
    with pytest.raises(RowError, match=problem) as caught:
        reader().read(value, row(place))
    assert str(caught.value).startswith("rows.jsonl line 7: ")


def test_a_truncated_image_is_refused(folder):
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    with pytest.raises(RowError, match=r"(?i)truncated"):
        reader().read(saved(noise, "JPEG")[:600], row())


def test_a_small_file_with_billions_of_pixels_is_not_decoded():
    bomb = saved(Image.new("1", (30_000, 30_000)), "PNG")
    assert len(bomb) < 1 << 20
    with pytest.raises(RowError, match="decompression bomb"):
        reader().read(bomb, row())


def test_a_format_that_runs_programs_is_no_picture():
    with pytest.raises(ValueError, match="no picture"):
        open_picture(saved(RED, "EPS"))


def test_a_large_image_is_made_smaller_and_counted():
    large = Image.effect_noise((100, 50), 90).convert("RGB")
    read = reader(image_max_pixels=800)
    content, picture = read.read(saved(large, "JPEG"), row())
    assert picture.size == (40, 20)
    # What is kept gives the same picture again.
    assert open_picture(content).tobytes() == picture.tobytes()
    untouched = png_of(RED)
    assert read.read(untouched, row())[0] == untouched
    assert (read.counts.read, read.counts.changed) == (2, 1)


def test_a_small_image_skips_its_row():
    with pytest.raises(Skipped, match=r"8 x 6 pixels, fewer than data.image_min_pixels 49"):
        reader(image_min_pixels=49).read(png_of(RED), row())
    reader(image_min_pixels=48).read(png_of(RED), row())


def test_a_picture_is_upright_and_rgb_as_transformers_reads_it(tmp_path):
    from transformers.image_utils import load_image

    left = Image.new("P", (4, 2))
    left.putpalette([255, 0, 0, 0, 0, 255])
    left.putpixel((0, 0), 1)
    exif = Image.Exif()
    exif[0x0112] = 6
    left.save(tmp_path / "left.png", exif=exif)
    expected = load_image(str(tmp_path / "left.png"))
    picture = open_picture((tmp_path / "left.png").read_bytes())
    assert picture.size == expected.size == (2, 4)
    assert picture.tobytes() == expected.tobytes()
