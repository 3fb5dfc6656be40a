"""`/v1/images/classifications` and `/v1/images/saliency`: from request to work, from result to answer."""

from __future__ import annotations

from aiohttp import web

from pagein.engines.local.answer import Answer, Work, json_answer
from pagein.engines.local.bodies import read_upload
from pagein.engines.local.model import Classifier, SaliencyMapper

_FILE_NAMES = ("image", "file")
_DEFAULT_TOP = 5


async def classifications(name: str, model: Classifier, request: web.Request) -> Work:
    """Read a request of `/v1/images/classifications`: an image, and how many labels are wanted (``top_k``)."""
    upload = await read_upload(request, "image", _FILE_NAMES, ("top_k",))
    top_k = upload.fields.whole("top_k", 1, 1000) or _DEFAULT_TOP

    def work(_: object) -> Answer:
        from pagein.engines.local.images import read_image  # only engines with images have Pillow

        image = read_image(upload.data)
        labels = model.classify(image, top_k)
        data = [{"label": found.label, "score": found.score, "index": found.index} for found in labels]
        return json_answer({"object": "list", "model": name, "data": data}, f"{image.width} × {image.height} pixels")

    return work


async def saliency(name: str, model: SaliencyMapper, request: web.Request) -> Work:
    """Read a request of `/v1/images/saliency`: an image."""
    upload = await read_upload(request, "image", _FILE_NAMES, ())

    def work(_: object) -> Answer:
        from pagein.engines.local.images import read_image

        image = read_image(upload.data)
        found = model.saliency(image)
        height, width = found.values.shape
        values = [round(float(value), 6) for value in found.values.flat]
        body = {
            "object": "saliency",
            "model": name,
            "map": {"width": width, "height": height, "values": values},
            "peak": {"x": found.x, "y": found.y, "score": found.score},
        }
        return json_answer(body, f"{image.width} × {image.height} pixels")

    return work
