"""Bearer tokens of an OpenID Connect issuer (JWT, RFC 7519, 8725): checked here, mapped to a Principal."""

import hashlib
from typing import Any

import jwt

from auth.cache import KeyCache
from auth.errors import BadCredentials, Forbidden
from auth.jwks import Jwks
from auth.principal import SERVICE_CLASSES, Principal, ServiceClass
from auth.schema import MAX_NAME_CHARS
from server.auth_sections import JwtSettings

REQUIRED = ["exp", "iss", "aud", "sub"]

# What PyJWT, json and base64 raise on bytes that nobody meant well.
_BROKEN = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


def looks_like_token(text: str) -> bool:
    """Whether `text` has the form of a signed JWT, which no API key has."""
    return text.count(".") == 2


class TokenVerifier:
    """Checks tokens of one issuer and says who their bearer is."""

    def __init__(self, settings: JwtSettings, jwks: Jwks, tenants: KeyCache) -> None:
        self._settings = settings
        self._jwks = jwks
        self._tenants = tenants
        self._algorithms = frozenset(settings.algorithms)

    async def principal(self, token: str) -> Principal:
        """The bearer. Raises BadCredentials, Forbidden, IdentityUnavailable."""
        claims = await self._claims(token)
        settings = self._settings
        name = claims.get(settings.tenant_claim, settings.default_tenant)
        tenant = await self._tenants.tenant(name) if isinstance(name, str) else None
        if tenant is None:
            raise Forbidden("The token names no tenant that is known here.", "unknown_tenant")
        subject = str(claims["sub"])
        digest = hashlib.sha256(f"{settings.issuer} {subject}".encode()).hexdigest()
        return tenant.principal(
            f"sub_{digest[:24]}",
            subject if _shows(subject) else "token",
            service_class=self._class(claims, tenant.service_class),
            scopes=_scopes(claims.get(settings.scope_claim)),
        )

    async def _claims(self, token: str) -> dict[str, Any]:
        """The claims of a token whose signature, issuer, audience and times are right."""
        try:
            header = jwt.get_unverified_header(token)
        except _BROKEN:
            raise _refused() from None
        algorithm, key_id = header.get("alg"), header.get("kid")
        # Of the header only these two count. The key is the issuer's: jwk, jku, x5u and x5c are never read.
        if (
            not isinstance(algorithm, str)
            or algorithm not in self._algorithms
            or not isinstance(key_id, str)
            or "crit" in header
        ):
            raise _refused()
        key = await self._jwks.key(key_id)
        if key is None or algorithm not in key.algorithms:
            raise _refused()
        try:
            return jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                issuer=self._settings.issuer,
                audience=self._settings.audience,
                leeway=self._settings.leeway_s,
                options={"require": REQUIRED},
            )
        except jwt.ExpiredSignatureError:
            raise BadCredentials("The token has expired.", token=True) from None
        except jwt.InvalidAudienceError:
            raise BadCredentials("The token is not meant for this server.", token=True) from None
        except _BROKEN:
            raise _refused() from None

    def _class(self, claims: dict[str, Any], default: ServiceClass) -> ServiceClass:
        value = claims.get(self._settings.class_claim, default)
        if value not in SERVICE_CLASSES:
            raise Forbidden("The token names a class of service that does not exist.", "unknown_class")
        return value  # type: ignore[no-any-return]


def _scopes(value: Any) -> frozenset[str]:
    """Scopes as OAuth writes them (text with spaces), or as some issuers do (a list); none is none."""
    if isinstance(value, str):
        return frozenset(value.split())
    return (
        frozenset(item for item in value if isinstance(item, str)) if isinstance(value, list) else frozenset()
    )


def _shows(subject: str) -> bool:
    return 0 < len(subject) <= MAX_NAME_CHARS and subject.isprintable()


def _refused() -> BadCredentials:
    return BadCredentials("The token is not valid here.", token=True)
