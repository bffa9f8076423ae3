"""From a configuration to the settings of the HTTP face."""

from __future__ import annotations

import pytest

from sylvan.config.load import load
from sylvan.config.sources import from_keywords
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.server.settings import ServerSettings
from sylvan.runtime.serving.service import sampling_defaults


def settings(**keywords: object) -> ServerSettings:
    return ServerSettings.from_config(load(from_keywords(keywords).settings).config)


def test_configuration_reaches_the_settings():
    ours = settings(
        preferred_sampling_params='{"temperature": 0.5}',
        default_chat_template_kwargs="enable_thinking=false,style=plain",
        text__cache_report=False,
        text__stream_include_usage=True,
        server__response_store_size=0,
    )

    assert ours.text.preferred_sampling_params == {"temperature": 0.5}
    assert ours.text.default_chat_template_kwargs == {"enable_thinking": False, "style": "plain"}
    assert (ours.text.cache_report, ours.text.stream_include_usage) == (False, True)
    assert ours.server.response_store_size == 0


@pytest.mark.parametrize("given", [{"temprature": 1}, {"top_p": 7.0}])
def test_preferred_parameters_that_make_no_sense_are_refused(given, tmp_path):
    with pytest.raises(ConfigError, match=next(iter(given))):
        sampling_defaults(settings(text__preferred_sampling_params=given).text, str(tmp_path))


def test_weights_of_tenants_are_positive_numbers():
    given = from_keywords({"scheduler__tenant_weights": "acme=2,other=0.5"})
    weights = load(given.settings).config.scheduler.tenant_weights
    assert weights == {"acme": 2.0, "other": 0.5}
    for bad in ("acme=0", "acme=much", "acme"):
        with pytest.raises(ConfigError):
            load(from_keywords({"scheduler__tenant_weights": bad}).settings)
