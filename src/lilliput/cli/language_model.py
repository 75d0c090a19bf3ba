"""A language model in a swarm: its ends and its tokenizer here, its blocks there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lilliput.cli import process
from lilliput.cli.answer import Answer
from lilliput.errors import BadRequest, ModelError

if TYPE_CHECKING:
    from lilliput.client.route import Hop
    from lilliput.client.session import InferenceSession
    from lilliput.swarm.loop import LoopThread

#: a chat or a text waits so long in the queues of full servers (seconds)
_QUEUE_SECONDS = 600.0


def load_libraries() -> None:
    """Import what `LanguageModel.open` needs, which takes seconds."""
    from lilliput.collector import collector_paused

    with collector_paused():
        import transformers  # noqa: F401

        import lilliput.client.gate
        import lilliput.client.generation
        import lilliput.client.model
        import lilliput.models.ends  # noqa: F401


class LanguageModel:
    """Make one with `LanguageModel.open`, end it with `close` or a `with` block.

    :param notice: takes remarks for a person
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, shared: Any, notice: Callable[[str], None]) -> None:
        self.name, self.tokenizer = name, tokenizer
        self._model, self._shared, self._notice = model, shared, notice

    @property
    def distributed(self) -> Any:
        """Hugging Face's model, whose blocks are in the swarm."""
        return self._model

    @property
    def loop(self) -> LoopThread:
        """Where the connection lives."""
        return self._shared.loop  # type: ignore[no-any-return]

    @classmethod
    def open(
        cls,
        model: str,
        initial_peers: Sequence[str] | None,
        *,
        swarm_key: str | None = None,
        trusted_peers: Sequence[str] = (),
        audit: float = 0.0,
        dtype: str | None = None,
        adapter: str = "",
        revision: str | None = None,
        token: str | None = None,
        queue: float = _QUEUE_SECONDS,
        wait: float | None = 0.0,
        notice: Callable[[str], None],
    ) -> LanguageModel:
        """Join the swarm and load the ends of a model. Raises what `from_pretrained` does.

        :param queue: seconds to wait in the queues of full servers
        :param wait: as of `from_pretrained`
        """
        if not initial_peers:
            raise BadRequest(NO_PEERS)
        with process.ending_at_once():
            load_libraries()
        from transformers import AutoTokenizer

        from lilliput.cli.progress import drawn
        from lilliput.client.connection import Patience, SharedConnection
        from lilliput.client.model import AutoDistributedModelForCausalLM
        from lilliput.models.sources import resolve
        from lilliput.swarm.swarm_key import SwarmKey

        key = SwarmKey.of(swarm_key or None)
        shared = SharedConnection.to(initial_peers, swarm_key=key)  # the model's own
        try:
            with drawn() as progress:
                files = resolve(model, revision=revision, token=token, weights=False, progress=progress)
                files.fetch("ends", progress)
                progress(f"looking for the blocks of {files.name}", 0, None)
                distributed = AutoDistributedModelForCausalLM.from_pretrained(
                    str(files.path),
                    initial_peers=initial_peers,
                    swarm_key=key,
                    trusted_peers=trusted_peers,
                    audit=audit,
                    dtype=dtype,
                    adapter=adapter,
                    patience=Patience(queue=queue),
                    wait=wait,
                )
            try:
                tokenizer = AutoTokenizer.from_pretrained(files.path)
            except Exception as e:  # whatever its files are, and whatever library reads them
                raise ModelError(
                    f"the tokenizer of {files.name} cannot be read ({e}); its files, tokenizer.json above all, belong "
                    f"into {files.path}"
                ) from e
        except BaseException:
            shared.close()
            raise
        return cls(files.name, distributed, tokenizer, shared, notice)

    def close(self) -> None:
        self._model.close()
        self._shared.close()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def chain(self) -> list[Hop]:
        """The servers that would serve a session now. Raises `MissingBlocks`."""
        remote = self._model.remote.remote_model
        chain: list[Hop] = self._shared.run(remote.chain(0, remote.blocks))
        return chain

    def max_length(self) -> int:
        """Tokens that a session may hold now: what the model was made for, and what its servers allow."""
        limits = [hop.record.max_length for hop in self.chain() if hop.record.max_length]
        made_for = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return min([made_for or 1 << 30, *limits])

    def session(self, max_length: int, *, rows: int = 1) -> InferenceSession:
        """A session of the whole model. Waits, when it is first used, in the queues of full servers."""

        def queued(hop: Hop, info: Any) -> None:
            ahead = "1 session" if info.queue_length == 1 else f"{info.queue_length} sessions"
            self._notice(f"server {hop} is full: {ahead} before us, about {info.start_seconds:.0f} s")

        session: InferenceSession = self._model.inference_session(max_length, rows=rows, on_queue=queued)
        return session

    def seed(self, seed: int | None) -> None:
        """Make what is chosen by chance repeatable."""
        import torch

        if seed is not None:
            torch.manual_seed(seed)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that is to be continued."""
        ids: list[int] = self.tokenizer(_encodable(text))["input_ids"]
        return ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The conversation in the form that the model was trained on, up to where its answer begins."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ModelError(
                f"{self.name} has no chat template: it was not made to talk. `lilliput generate` continues a text."
            )
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as e:  # a template is a program of the model's makers
            raise ModelError(f"the chat template of {self.name} does not take this conversation: {e}") from e
        ids: list[int] = self.tokenizer(_encodable(text), add_special_tokens=False)["input_ids"]
        return ids

    def generate(
        self, ids: list[int], session: InferenceSession, answer: Answer | None, *, max_new_tokens: int, **options: Any
    ) -> list[int]:
        """Continue `ids`; the new tokens, which `answer` gets one by one before."""
        import torch

        prompt = torch.tensor([ids])
        config = self._model.generation_config
        padding = next(p for p in (config.pad_token_id, self.tokenizer.pad_token_id, 0) if p is not None)
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            session=session,
            streamer=answer,
            max_new_tokens=max_new_tokens,
            pad_token_id=padding,
            **options,
        )
        new: list[int] = output[0, len(ids) :].tolist()
        return new


def _encodable(text: str) -> str:
    """Without the surrogates that stand for bytes which are no UTF-8."""
    return text.encode(errors="replace").decode()


NO_PEERS = (
    "Name a member of the swarm with --initial-peers ADDRESS or in LILLIPUT_PEERS; "
    "servers print theirs when they start."
)
