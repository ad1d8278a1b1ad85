"""TemplateSandbox: a template reaches nothing but its values, and every way of not ending ends."""

from __future__ import annotations

from datetime import datetime

import pytest
from jinja2 import TemplateError

from twinpool.text.sandbox import RenderLimits, TemplateSandbox

LIMITS = RenderLimits(max_steps=10_000, max_chars=100_000, timeout_s=60.0)


def render(source: str, limits: RenderLimits = LIMITS, **variables: object) -> str:
    return TemplateSandbox(source, limits=limits, now=datetime.now).render(variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ ''['__cla' ~ 'ss__'] }}",
        "{{ ''|attr('__cla' + 'ss__') }}",
        "{{ [x]|map(attribute='__class__')|list }}",
        "{{ '{0.__class__}'.format(x) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ dict.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ x.append(1) }}",
        "{% for a in x %}{{ loop._iterator }}{% endfor %}",
    ],
)
def test_what_is_private_or_changes_a_value_is_refused(source: str) -> None:
    with pytest.raises(TemplateError, match=r"it reaches for|it stores|unsafe|is not allowed"):
        render(source, x=[1])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999)|select %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ x.replace('a', x) }}",
        "{{ x|replace('a', x) }}",
        "{{ x.join([x] * 100) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=1000000000) }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% set s %}{% for i in range(5000) %}{{ x }}{% endfor %}{% endset %}",
        "{% for i in range(5000) %}" + "literal text " * 100 + "{% endfor %}",
        "{% for i in range(5000) %}{{ x }}{% endfor %}",
        "{{ range(1000000000) }}",
        "{{ [0]|batch(1000000000, 0)|list }}",
    ],
)
def test_every_way_of_growing_without_end_ends(source: str) -> None:
    with pytest.raises(
        TemplateError, match=r"it takes|it makes|it uses|it formats|it writes|memory|OverflowError"
    ):
        render(source, x="a" * 2000)


def test_the_time_of_a_rendering_is_limited() -> None:
    limits = RenderLimits(max_steps=10**12, max_chars=10**9, timeout_s=0.05)
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}"

    with pytest.raises(TemplateError, match=r"it takes more than 0\.05 s"):
        render(source, limits)


def test_a_budget_is_of_one_rendering() -> None:
    template = TemplateSandbox("{% for a in range(6000) %}a{% endfor %}", limits=LIMITS, now=datetime.now)

    assert template.render({}) == template.render({}) == "a" * 6000


def test_what_templates_use_works_as_in_plain_jinja() -> None:
    source = (
        "{% for a in x %}{% if a == 2 %}{% continue %}{% endif %}"
        "{{ loop.index }}/{{ loop.length }}{{ '' if loop.last else ',' }}{% endfor %} "
        "{% for k, v in d.items() %}{{ k ~ v }}{% endfor %} "
        "{% for a in x if a > 1 recursive %}{{ a }}{% if a == 3 %}{{ loop([2]) }}{% endif %}{% endfor %} "
        "{% for a in missing %}never{% else %}none{% endfor %} "
        "{{ '%03d' % 7 }} {{ '{:>4}'.format('a') }} {{ 2 ** 8 }} {{ [1] + [2] }} {{ 'ab' * 2 }} "
        "{{ x|map('string')|join('+') }} {{ d|tojson }} {{ 1700000000|default(0) }} "
        "{{ dict(self=1)['self'] }}"
    )

    text = render(source, x=[1, 2, 3], d={"k": "<\u00e9>"})

    assert text == (
        '1/3,3/3 k<\u00e9> 232 none 007    a 256 [1, 2] abab 1+2+3 {"k": "<\u00e9>"} 1700000000 1'
    )


def test_errors_of_a_template_are_template_errors() -> None:
    for source in ("{{ 1 / 0 }}", "{{ [] + 1 }}", "{{ x.y.z }}", "{{ 'a'.index('b') }}", "{{ x|tojson }}"):
        with pytest.raises(TemplateError):
            render(source)
