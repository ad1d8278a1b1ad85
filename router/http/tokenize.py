"""/tokenize and /detokenize, in the shape of vLLM's."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from router.http.body import read_object
from router.http.config import HTTPConfig
from router.http.model import ServedModel
from router.http.prepare import Preparer
from router.http.schema import DetokenizeBody, TokenizeChatBody, TokenizeTextBody, validate


class TokenizeRoutes:
    """Endpoints between text and token ids.

    Args:
        model: Whose tokenizer it is.
        preparer: Does what the generating routes do, so that the ids are the same.
        config: Limits of the body.
    """

    def __init__(self, model: ServedModel, preparer: Preparer, config: HTTPConfig) -> None:
        self._model = model
        self._preparer = preparer
        self._config = config

    async def tokenize(self, request: HTTPRequest) -> Response:
        """Return the ids of a prompt, or of a conversation rendered with the chat template."""
        raw = await read_object(request.scope, request.receive, self._config)
        body: TokenizeTextBody | TokenizeChatBody
        if raw.get("messages") is not None:
            body = validate(TokenizeChatBody, raw)
            self._preparer.check_model(body.model)
            ids = await self._preparer.conversation_ids(body)
        else:
            body = validate(TokenizeTextBody, raw)
            self._preparer.check_model(body.model)
            ids = await self._preparer.text_ids(body.prompt, add_special_tokens=body.add_special_tokens)
        answer: dict[str, object] = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": self._model.max_model_tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = [self._model.tokenizer.token_text(token_id) for token_id in ids]
        return JSONResponse(answer)

    async def detokenize(self, request: HTTPRequest) -> Response:
        """Return the text of token ids."""
        raw = await read_object(request.scope, request.receive, self._config)
        body = validate(DetokenizeBody, raw)
        self._preparer.check_model(body.model)
        self._preparer.check_ids("tokens", body.tokens)
        decode = self._model.tokenizer.decode
        text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=body.skip_special_tokens)
        return JSONResponse({"prompt": text})
