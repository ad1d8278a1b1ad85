"""Ask a running server and print the answer as it comes, with OpenAI's own client.

    pip install openai
    twinpool serve                                        # in another terminal
    python examples/chat_stream.py "Why is the sky blue?"

TWINPOOL_URL and TWINPOOL_API_KEY name another server and its key.
"""

from __future__ import annotations

import os
import sys

from openai import APIError, OpenAI


def main() -> int:
    """Print one streamed answer; return 1 if it is not complete."""
    question = " ".join(sys.argv[1:]) or "Why is the sky blue?"
    url = os.environ.get("TWINPOOL_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TWINPOOL_API_KEY", "none"))
    try:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": question}],
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n[{chunk.usage.completion_tokens} tokens]")
    except APIError as error:  # refused before the first token, or an error event in mid-stream
        print(f"\nno complete answer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
