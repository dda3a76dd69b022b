"""Why a caller is refused. Messages are for the client: they quote nothing that it sent."""


class BadCredentials(Exception):
    """401: no credentials, or none that are good."""

    def __init__(self, message: str, *, token: bool = False) -> None:
        """`token`: a bearer token was understood as one and refused (RFC 6750's `invalid_token`)."""
        super().__init__(message)
        self.challenge = 'Bearer error="invalid_token"' if token else "Bearer"


class Forbidden(Exception):
    """403: a known caller that may not do this."""

    def __init__(self, message: str, code: str, *, scopes: frozenset[str] = frozenset()) -> None:
        """`code` is OpenAI's error code; `scopes` are the OAuth scopes that would be enough."""
        super().__init__(message)
        self.code = code
        self.challenge = (
            f'Bearer error="insufficient_scope", scope="{" ".join(sorted(scopes))}"' if scopes else None
        )


class TenantDisabled(Forbidden):
    """The caller's tenant was disabled by the operator."""

    def __init__(self) -> None:
        super().__init__("The tenant of this key is disabled.", "tenant_disabled")


class IdentityUnavailable(Exception):
    """503: what is needed to know the caller can't be had now. The message is one line, for the log."""


class KeyStoreUnavailable(IdentityUnavailable):
    """The database cannot be used now; the message holds no secret."""


class SigningKeysUnavailable(IdentityUnavailable):
    """The issuer's signing keys have never been had so far."""
