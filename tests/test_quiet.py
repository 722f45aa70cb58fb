"""What is logged and warned of inside and after `quietly`."""

import logging
import warnings

from lightconv_plugin.quiet import quietly


def test_the_state_before_is_restored_also_when_nested(caplog):
    logger = logging.getLogger("somebody's")
    with caplog.at_level(logging.DEBUG):
        with quietly(logging.WARNING):
            with quietly():
                logger.info("a")
            logger.warning("b")
            logger.error("c")
        logger.info("d")
    assert caplog.messages == ["c", "d"]


def test_warnings_of_users_are_hidden_only_on_request():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with quietly():
            warnings.warn("a", UserWarning, stacklevel=1)
        with quietly(user_warnings=False):
            warnings.warn("b", UserWarning, stacklevel=1)
            warnings.warn("c", DeprecationWarning, stacklevel=1)
        warnings.warn("d", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in found] == ["a", "c", "d"]
