"""/v1/models: the one model that is served."""

from __future__ import annotations

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from router.http.errors import ModelNotFound
from router.http.model import ServedModel


class ModelRoutes:
    """Endpoints about the model.

    Args:
        model: What is served.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def list(self, _: HTTPRequest) -> Response:
        """List all models, which is one."""
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def get(self, request: HTTPRequest) -> Response:
        """Return one model; its name may have slashes."""
        if request.path_params["name"] != self._model.name:
            raise ModelNotFound(self._model.name)
        return JSONResponse(self._describe())

    def _describe(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created_s,
            "owned_by": "twinpool",
            "max_model_len": self._model.max_model_tokens,
        }
