"""Errors as OpenAI's interface has them."""

from typing import Any


class ApiError(Exception):
    """An answer that is an error: its HTTP status, its message, and the field of the request that it is about."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}
