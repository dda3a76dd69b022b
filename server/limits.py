"""Limits in HTTP's words: what a route and the protocol call, and the answers of refusals."""

from datetime import UTC, datetime, timedelta

from auth.limiter import Limiter, LimitExceeded, kind_text
from auth.limits import SECOND_US, StoreUnavailable
from auth.principal import Principal
from server.context import RequestContext
from server.errors import ApiError, unavailable


async def admit(limiter: Limiter, ctx: RequestContext) -> None:
    """The first step of a request that the engine works for, before its body is read.

    Its caller is known. Raises ApiError (429, 503).
    """
    assert ctx.principal is not None
    ctx.reservation = limiter.reservation(ctx, ctx.principal)
    if ctx.reservation is None:
        return
    try:
        await ctx.reservation.admit()
    except LimitExceeded as error:
        raise too_many(error) from None
    except StoreUnavailable:
        raise _store_down() from None


async def take_tokens(ctx: RequestContext, prompt_tokens: int, output_tokens: int, longest: int) -> None:
    """The second step, before the engine sees the request. Raises ApiError (429, 503).

    `output_tokens`: the most that all choices may have together, `longest`: the most of one.
    """
    if ctx.reservation is None:
        return
    try:
        await ctx.reservation.take_tokens(prompt_tokens, output_tokens, longest)
    except LimitExceeded as error:
        raise too_many(error) from None
    except StoreUnavailable:
        raise _store_down() from None


def body_limit(principal: Principal | None, default: int) -> int:
    """Most bytes of a body: the smaller of the tenant's and the key's limit, or `default`."""
    if principal is None:
        return default
    limits = (principal.tenant_limits.max_body_bytes, principal.key_limits.max_body_bytes)
    return min((limit for limit in limits if limit is not None), default=default)


def too_many(error: LimitExceeded) -> ApiError:
    """429 with the time of the limit that refused; a client that waits so long is admitted."""
    demand, answer = error.demand, error.answer
    whose = "this tenant" if demand.scope == "tenant" else "this API key"
    what = (
        f"{kind_text(demand.kind)} (limit {demand.limit}, left {answer.remaining}, requested {demand.amount})"
    )
    headers = {"Retry-After": str(error.retry_after_s)}
    if error.hopeless:
        headers["x-should-retry"] = "false"  # OpenAI's clients obey it
    if answer.wait_us < 0:
        message = f"The request asks for more than the whole limit of {whose}: {what}. Ask for fewer tokens."
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)
    if demand.kind.period:
        ends = (datetime.now(UTC) + timedelta(microseconds=answer.wait_us)).isoformat(timespec="seconds")
        message = f"The quota of {whose} is used up: {what}. It starts again at {ends}."
        return ApiError(429, message, code="insufficient_quota", headers=headers)
    wait_s = max(1, -(-answer.wait_us // SECOND_US))
    message = f"Rate limit of {whose} reached: {what}. Try again in {wait_s} s."
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def too_long_output(name: str, asked: int, limit: int) -> ApiError:
    """400, as OpenAI answers more output than the model may give."""
    message = f"'{name}' is too large: {asked}. At most {limit} output tokens are allowed here."
    return ApiError(400, message, code="max_output_tokens_exceeded", param=name)


def _store_down() -> ApiError:
    return unavailable("Limits can't be checked at the moment.", retry_after_s=2)
