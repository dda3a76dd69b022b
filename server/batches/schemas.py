"""Bodies of /v1/files and /v1/batches for the API's document; objects in answers are the OpenAI package's."""

from typing import Annotated, Literal

from openai.types import Batch, FileObject
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from server.batches.calls import ENDPOINTS

Endpoint = Annotated[str, WithJsonSchema({"type": "string", "enum": sorted(ENDPOINTS)})]


class ExpiresAfter(BaseModel):
    """When a file is deleted, where that is before `batch.retention_days`."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * 24 * 3600)


class BatchCreateRequest(BaseModel):
    """A batch to be started."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = None
    output_expires_after: ExpiresAfter | None = None


class FileCreateRequest(BaseModel):
    """The form of an upload; also `expires_after[anchor]` and `expires_after[seconds]`."""

    model_config = ConfigDict(extra="allow")

    purpose: Literal["batch"]
    file: Annotated[bytes, WithJsonSchema({"type": "string", "format": "binary"})]


class BatchList(BaseModel):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
