"""The fields that say how a chat is written for the model."""

from typing import Any, Self

from pydantic import model_validator

from engine import InvalidRequest
from serve_app.protocol.strict import RequestModel


class ChatTemplateFields(RequestModel):
    """vLLM's. add_generation_prompt: end where the assistant begins, by default. continue_final_message: end inside of
    the last message instead, which the answer goes on with. chat_template_kwargs: what the model's template takes.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_ends_once(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are both true; a chat ends in one way, give one",
                "continue_final_message",
            )
        return self

    def template_options(self) -> dict[str, Any]:
        """Gives the arguments of the chat template."""
        continues = bool(self.continue_final_message)
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "add_generation_prompt": begins,
            "continue_final_message": continues,
            "template_values": self.chat_template_kwargs or {},
        }
