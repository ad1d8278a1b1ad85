"""Users wait in turn: a crowd of one user's requests does not stand before another user's single one."""

from __future__ import annotations

import threading

from router.config import RouterConfig
from router.http.config import HTTPConfig
from tests.patience import until
from tests.router_http.toys import Site


def test_one_user_does_not_starve_another() -> None:
    site = Site(HTTPConfig(port=0), router_config=RouterConfig(max_running_per_worker=1))
    site.worker.delay_s = 1.0  # until everybody is there
    asking = []

    def ask(prompt: str, user: str) -> None:
        body = {"prompt": prompt, "user": user, "max_tokens": 2}
        asking.append(threading.Thread(target=site.post, args=("/v1/completions", body)))
        asking[-1].start()

    try:
        for _ in range(6):
            ask("a", "crowd")
        assert until(lambda: site.router.num_queued == 5, within_s=10.0)
        ask("b", "one")
        assert until(lambda: site.router.num_queued == 6, within_s=10.0)
        site.worker.delay_s = 0.0
        for each in asking:
            each.join(timeout=20)
        order = "".join(chr(request.prompt_ids[-1]) for request in site.worker.requests)
    finally:
        site.close()

    assert sorted(order) == list("aaaaaab")
    assert order.index("b") <= 2, order
