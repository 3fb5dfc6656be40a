"""Image endpoints: the three ways to send an image, the two answers, and what is refused."""

from __future__ import annotations

import base64
import io

import aiohttp
import pytest
from PIL import Image

from tests.engines.local.tiny import TinyClassifier, TinyMapper

CLASSIFICATIONS, SALIENCY = "/v1/images/classifications", "/v1/images/saliency"


def png(colour: str = "red") -> bytes:
    """A small image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (4, 3), colour).save(file, "PNG")
    return file.getvalue()


def encoded(prefix: str = "") -> str:
    """The image as base64."""
    return prefix + base64.b64encode(png()).decode()


def form(field: str) -> aiohttp.FormData:
    """A form with the image and top_k."""
    data = aiohttp.FormData({"top_k": "1"})
    data.add_field(field, png(), filename="a.png", content_type="image/png")
    return data


@pytest.mark.parametrize(
    "arguments",
    [
        {"json": {"image": encoded(), "top_k": 1}},
        {"json": {"image": encoded("data:image/png;base64,"), "top_k": 1}},
        {"data": png(), "headers": {"Content-Type": "image/png"}, "params": {"top_k": "1"}},
        {"data": png(), "headers": {"Content-Type": "application/octet-stream"}, "params": {"top_k": "1"}},
    ],
)
async def test_an_image_comes_as_json_or_as_the_body(ask, arguments):
    """base64, a data: URL and a raw body with its fields in the query mean the same."""
    reply = await ask(TinyClassifier(), CLASSIFICATIONS, **arguments)
    assert reply.status == 200
    assert reply.body == {"object": "list", "model": "tiny", "data": [{"label": "red", "score": 1.0, "index": 0}]}


@pytest.mark.parametrize("field", ["image", "file"])
async def test_an_image_comes_as_a_form(ask, field):
    """A multipart form may call the image `image` or `file`."""
    reply = await ask(TinyClassifier(), CLASSIFICATIONS, data=form(field))
    assert [row["label"] for row in reply.body["data"]] == ["red"]


async def test_saliency_gives_a_row_major_map_and_its_peak(ask):
    """The map is listed row by row with its width and height; the peak has relative coordinates."""
    reply = await ask(TinyMapper(), SALIENCY, json={"image": encoded()})
    assert reply.body["map"] == {"width": 3, "height": 2, "values": [0, 0, 1, 0.25, 0, 0]}
    assert reply.body["peak"] == {"x": 0.9, "y": 0.1, "score": 1.0}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "image", "missing"),
        ({"image": "https://example.org/a.png"}, "image", "fetches nothing"),
        ({"image": "file:///a.png"}, "image", "fetches nothing"),
        ({"image": "data:image/png,abc"}, "image", "base64"),
        ({"image": "!!!"}, "image", "base64"),
        ({"image": 7}, "image", "base64"),
        ({"image": ""}, "image", "empty"),
        ({"image": base64.b64encode(b"no image").decode()}, "image", "not one of"),
        ({"image": encoded()[:60]}, "image", "image"),
        ({"image": encoded(), "top_k": 0}, "top_k", "from 1 to 1000"),
        ({"image": encoded(), "topk": 3}, "topk", "did you mean top_k?"),
    ],
)
async def test_a_fault_names_its_field(ask, body, param, words):
    """Bad images and fields are a 400 that names the field; URLs are never fetched."""
    reply = await ask(TinyClassifier(), CLASSIFICATIONS, json=body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]


async def test_other_content_types_are_refused(ask):
    """A body that announces neither an image, a form nor JSON is refused with what is taken."""
    reply = await ask(TinyClassifier(), CLASSIFICATIONS, data=png(), headers={"Content-Type": "audio/wav"})
    assert (reply.status, reply.error["param"]) == (400, "Content-Type")


async def test_a_form_takes_one_file_only(ask):
    """Two images in one form are refused instead of one being dropped."""
    data = form("image")
    data.add_field("file", png(), filename="b.png")
    reply = await ask(TinyClassifier(), CLASSIFICATIONS, data=data)
    assert (reply.status, reply.error["param"]) == (400, "file")
