"""Adds ``--kv-policy`` to everything that uses vLLM's ``EngineArgs``.

Wraps three methods of ``EngineArgs`` in every process, because a policy can only be
configured through them. ``activation.finish_config`` wraps everything else, when an
engine is configured with a policy.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from vllm_kvplugins.choice import AUTO
from vllm_kvplugins.config import (
    CONFIG_KEY,
    check_request,
    is_auto,
    parse_options,
)
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.policies.registry import available_policies
from vllm_kvplugins.vllm_adapter.startup import auto, refusals

_INSTALLED = "_kvplugins_installed"


def install() -> None:
    """Wrap three methods of ``EngineArgs``; idempotent."""
    if getattr(EngineArgs, _INSTALLED, False):
        return
    setattr(EngineArgs, _INSTALLED, True)
    _wrap_add_cli_args()
    _wrap_from_cli_args()
    _wrap_create_engine_config()
    refusals.report_to_parent()


def _wrap_add_cli_args() -> None:
    original = EngineArgs.add_cli_args

    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        group = parser.add_argument_group(
            title="KVPolicy", description="KV-cache policy (vllm_kvplugins)."
        )
        group.add_argument(
            "--kv-policy",
            type=str,
            default=None,
            metavar="NAME",
            help=f"KV-cache policy: {AUTO}, which chooses one by measurements and "
            f"logs why, or {', '.join(available_policies())}.",
        )
        group.add_argument(
            "--kv-policy-config",
            type=str,
            default=None,
            metavar="JSON",
            help="Settings of the policy as a JSON object, for example "
            "'{\"budget\": 512}'. `kvplugins list` shows what each policy takes, and "
            f"what {AUTO} takes.",
        )
        return parser

    EngineArgs.add_cli_args = staticmethod(add_cli_args)


def _wrap_from_cli_args() -> None:
    original = EngineArgs.from_cli_args.__func__

    @functools.wraps(original)
    def from_cli_args(cls: type[EngineArgs], args: argparse.Namespace) -> EngineArgs:
        refusals.print_without_traceback()
        request = _request_from_flags(args)
        if request is not None:
            config = dict(getattr(args, "additional_config", None) or {})
            if CONFIG_KEY in config:
                raise KVPolicyError(
                    coded(
                        "KVP026",
                        f"--kv-policy {request['name']} and {CONFIG_KEY!r} in "
                        "--additional-config are both set; use one of them",
                    )
                )
            args.additional_config = config | {CONFIG_KEY: request}
            # Processes that get these arguments find the request in one place.
            args.kv_policy = args.kv_policy_config = None
        engine_args: EngineArgs = original(cls, args)
        auto.remember_arguments(engine_args, args)
        return engine_args

    EngineArgs.from_cli_args = classmethod(from_cli_args)


def _request_from_flags(args: argparse.Namespace) -> dict[str, Any] | None:
    name = getattr(args, "kv_policy", None)
    options = getattr(args, "kv_policy_config", None)
    if name is None:
        if options is not None:
            raise KVPolicyError(
                coded(
                    "KVP027",
                    f"--kv-policy-config {options!r} has no effect alone; add "
                    "--kv-policy NAME",
                )
            )
        return None
    request = {"name": name} | (parse_options(options) if options else {})
    check_request(request)
    return request


def _wrap_create_engine_config() -> None:
    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        from vllm_kvplugins.vllm_adapter.startup import activation

        def build(engine_args: EngineArgs) -> Any:
            return original(engine_args, *args, **kwargs)

        config = self.additional_config
        request = config.get(CONFIG_KEY) if isinstance(config, dict) else None
        if request is None:
            activation.deactivate()
            return build(self)
        if is_auto(request):
            vllm_config = auto.configured(self, request, build)
        else:
            vllm_config = activation.configured(self, request, build)
        refusals.install()
        return vllm_config

    EngineArgs.create_engine_config = create_engine_config
