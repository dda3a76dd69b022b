"""The files that a batch leaves behind."""

from collections.abc import AsyncIterator, Sequence

from server.batches.files import OUTPUT_PURPOSE, FileStore
from server.batches.leases import Leases, Result
from server.batches.lines import Fault, read_line, undone_line
from server.batches.store import Batch

PAGE_LINES = 64
UNDONE = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
    "failed": ("batch_failed", "This request was not executed: the batch failed."),
}
"""What lines of error say of requests without an answer, by the batch's last status."""


async def add_undone(
    leases: Leases, batch: Batch, lines: AsyncIterator[tuple[int, bytes]], status: str
) -> None:
    """A line of error for each of `lines` that has no result. Raises LeaseLost."""
    done = await leases.done(batch.id)
    page: list[Result] = []
    async for number, text in lines:
        if number in done:
            continue
        custom_id = read_line(text, batch.endpoint).custom_id
        page.append(Result(number, False, undone_line(batch.id, number, custom_id, *UNDONE[status])))
        if len(page) == PAGE_LINES:
            await leases.add(batch.id, page, answered=False)
            page = []
    if page:
        await leases.add(batch.id, page, answered=False)


async def write_files(
    leases: Leases, files: FileStore, batch: Batch, status: str, faults: Sequence[Fault]
) -> None:
    """Writes results into files of output and errors; the batch ends with `status`. Raises LeaseLost."""
    output, errors = (
        files.writer(batch.tenant, OUTPUT_PURPOSE, f"{batch.id}_{kind}.jsonl", batch.output_expires_s)
        for kind in ("output", "error")
    )
    async for result in leases.results(batch.id):
        await (output if result.ok else errors).write(result.content + b"\n")
    await output.flush()
    await errors.flush()
    await leases.finish(batch.id, status, faults=faults, output=output, errors=errors)
