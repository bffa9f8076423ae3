"""The interface of message transports between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sylvan.protocol.errors import CapacityError, SylvanError

Message = TypeVar("Message")
Send = TypeVar("Send")
Recv = TypeVar("Recv")
SendContra = TypeVar("SendContra", contravariant=True)
RecvCo = TypeVar("RecvCo", covariant=True)


class MessageError(SylvanError):
    """One message is malformed; later ones are unaffected."""


class ChannelFullError(CapacityError):
    """The receiver does not keep up with the messages."""


class MessageSender(Protocol[SendContra]):
    """The sending end. Messages arrive whole and in order, or not at all."""

    def send(self, message: SendContra) -> None:
        """Send a message; blocks while the receiver is far behind.

        Raises:
            ChannelFullError: It stayed behind; the message was not sent.
            MessageError: The message is too large to send.
        """
        ...

    def close(self) -> None:
        """Close the end; messages in transit may be lost. Idempotent."""
        ...


class MessageReceiver(Protocol[RecvCo]):
    """The receiving end, for a process that may block."""

    def receive(self, timeout_s: float = 0.0) -> RecvCo | None:
        """Return the next message, or None if there is none within `timeout_s`.

        Raises:
            MessageError: The received data is malformed; it is dropped.
        """
        ...

    def close(self) -> None:
        """Close the end; unread messages are lost. Idempotent."""
        ...


class AsyncReceiver(Protocol[RecvCo]):
    """The receiving end, for a process that runs an event loop."""

    async def receive(self) -> RecvCo:
        """Wait for the next message.

        Raises:
            MessageError: The received data is malformed; it is dropped.
        """
        ...

    def close(self) -> None:
        """Close the end; unread messages are lost. Idempotent."""
        ...


class DuplexChannel(Protocol[SendContra, RecvCo]):
    """Both directions, for a process that may block."""

    def send(self, message: SendContra) -> None: ...

    def receive(self, timeout_s: float = 0.0) -> RecvCo | None: ...

    def close(self) -> None:
        """Close both ends."""
        ...


class AsyncChannel(Protocol[SendContra, RecvCo]):
    """Both directions, for a process that runs an event loop; `send` never blocks it."""

    def send(self, message: SendContra) -> None: ...

    async def receive(self) -> RecvCo: ...

    def close(self) -> None:
        """Close both ends."""
        ...


@dataclass(frozen=True, slots=True)
class Duplex(Generic[Send, Recv]):
    """A `DuplexChannel` made of two ends."""

    sender: MessageSender[Send]
    receiver: MessageReceiver[Recv]

    def send(self, message: Send) -> None:
        self.sender.send(message)

    def receive(self, timeout_s: float = 0.0) -> Recv | None:
        return self.receiver.receive(timeout_s)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@dataclass(frozen=True, slots=True)
class AsyncDuplex(Generic[Send, Recv]):
    """An `AsyncChannel` made of two ends."""

    sender: MessageSender[Send]
    receiver: AsyncReceiver[Recv]

    def send(self, message: Send) -> None:
        self.sender.send(message)

    async def receive(self) -> Recv:
        return await self.receiver.receive()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
