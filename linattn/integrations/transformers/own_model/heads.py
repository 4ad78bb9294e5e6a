"""Our models with a head: the next token, a class for each sequence, a class for each token."""

from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from linattn.integrations.transformers.own_model.cache import LinattnCache, old_cache_name
from linattn.integrations.transformers.own_model.config import LinattnConfig
from linattn.integrations.transformers.own_model.model import LinattnPreTrainedModel, checked_inputs, make_key_mask
from linattn.models import LanguageModel
from linattn.models.loss import NO_LABEL, count_following
from linattn.nn.checks import out_of_range
from linattn.states import segmented_loss


class LinattnForCausalLM(LinattnPreTrainedModel, GenerationMixin):
    """Predicts the token after each one, and generates."""

    # Trainer then passes num_items_in_batch, so that accumulated steps weigh every token equally
    accepts_loss_kwargs = True
    segment_length: int | None = None
    """Number of tokens per segment, for training on long sequences: a call with labels reads the tokens in segments
    (`linattn.states.segmented_loss`) and returns the loss without logits. None: all tokens at once."""

    def __init__(self, config: LinattnConfig):
        super().__init__(config)
        if not self.model.causal:
            raise ValueError("this configuration is an encoder's (causal is False), which predicts no next token")
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel) -> "LinattnForCausalLM":
        """Wrap the model without copying it: training one trains the other."""
        if not isinstance(model, LanguageModel):
            raise ValueError(f"model must be a LanguageModel, but is a {type(model).__name__}")
        with torch.device("meta"):
            wrapper = cls(LinattnConfig(language_model=model.config))
        wrapper.model = model
        return wrapper.train(model.training)

    @old_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Float[Tensor, "b n d"] | None = None,
        labels: Int[Tensor, "b labels"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Return the loss, and the logits after all tokens (0), the last few (int) or chosen ones (indices).
        Labels (b, n + 1) also have the target of the last token."""
        cache = self._checked_cache(cache, use_cache)
        if labels is not None and self.segment_length is not None:
            others = {
                "inputs_embeds": inputs_embeds is not None,
                "logits_to_keep": not isinstance(logits_to_keep, int) or logits_to_keep != 0,
                "output_hidden_states": output_hidden_states,
                "output_attentions": output_attentions,
            }
            self._check_segments([name for name, value in others.items() if value])
            tokens = checked_inputs(self.model, input_ids, None)
            return self._in_segments(tokens, attention_mask, labels, cache, num_items_in_batch)
        x, key_mask, states = self.hidden(
            input_ids, attention_mask, inputs_embeds, output_hidden_states, output_attentions, cache
        )
        # 0 means all of them, as in x[:, -0:]
        logits = self.model.logits(x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep])
        loss = None
        if labels is not None:
            if isinstance(logits_to_keep, Tensor) or logits.shape[1] != x.shape[1]:
                raise ValueError("the loss of labels needs the logits after all tokens: give no logits_to_keep")
            labels = _present(labels, key_mask, count_following(labels, x))
            # models take int32 tokens too, unlike torch's loss
            targets = labels[:, 1:].long()
            targets = F.pad(targets, (0, x.shape[1] - targets.shape[1]), value=NO_LABEL).contiguous()
            options = {"num_items_in_batch": num_items_in_batch, "shift_labels": targets}
            try:
                loss = self.loss_function(logits, labels, logits.shape[-1], **options)
            except IndexError as error:
                raise out_of_range("labels", targets[targets != NO_LABEL], logits.shape[-1]) from error
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache, hidden_states=states)

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return None if the matrix of the embeddings makes the logits."""
        return cast(nn.Linear | None, self.model.head)

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.model.head = new_embeddings

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("continuous batching pages keys and values; a linattn model has a state instead")

    def _check_segments(self, others: list[str]) -> None:
        """Raise ValueError if the call has arguments, whose names are in `others`, or the model is in a mode, that
        training in segments does not support."""
        if self.gradient_checkpointing and self.training:
            others = [*others, "activation checkpointing"]
        if any(isinstance(module, FSDPModule) for module in self.modules()):
            others = [*others, "FSDP"]
        if others:
            raise ValueError(f"segment_length is {self.segment_length}, which does not work with {', '.join(others)}")

    def _in_segments(
        self,
        tokens: Int[Tensor, "b n"],
        attention_mask: Tensor | None,
        labels: Int[Tensor, "b labels"],
        cache: LinattnCache | None,
        num_items: Tensor | int | None,
    ) -> CausalLMOutputWithPast:
        assert self.segment_length is not None
        seen, state = (0, None) if cache is None else (cache.get_seq_length(), cache.state)
        key_mask = make_key_mask(attention_mask, tokens, seen)
        labels = _present(labels, key_mask, count_following(labels, tokens))
        loss, state = segmented_loss(
            self.model, tokens, state, segment=self.segment_length, labels=labels, key_mask=key_mask
        )
        if num_items is not None:
            # the mean becomes a sum over the batch, divided by the labels of all batches of the step
            loss = loss * (labels[:, 1:] != NO_LABEL).sum() / num_items
        if cache is not None:
            cache.put_state(state, tokens.shape[1])
        return CausalLMOutputWithPast(loss=loss, cache=cache)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Create our cache: `generate` calls this method, which creates a DynamicCache in other models."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation {generation_config.cache_implementation!r}: a linattn model has one kind of "
                "cache, of constant size"
            )
        if model_kwargs.get("cache") is None and generation_config.use_cache:
            model_kwargs["cache"] = cache = LinattnCache()
            if generation_config.is_assistant:
                cache.activate_past_recording()


class _Classifier(LinattnPreTrainedModel):
    """Scores classes by a linear map of vectors. `config.num_labels` is as in every model of transformers."""

    def __init__(self, config: LinattnConfig, *, bias: bool):
        super().__init__(config)
        self.model.head = None
        self.score = nn.Linear(config.hidden_size, cast(int, config.num_labels), bias=bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Float[Tensor, "b n d"] | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> Any:
        x, key_mask, states = self.hidden(
            input_ids, attention_mask, inputs_embeds, output_hidden_states, output_attentions
        )
        return self._output(x, key_mask, labels, states)

    def _output(self, x: Tensor, key_mask: Tensor | None, labels: Tensor | None, states: Any) -> Any:
        raise NotImplementedError


class LinattnForSequenceClassification(_Classifier):
    """Scores the classes of a whole sequence from the mean of its tokens' vectors or, if causal, from the last token's.

    Missing tokens do not count. `config.num_labels` and `config.problem_type` are as in every model of transformers."""

    def __init__(self, config: LinattnConfig):
        super().__init__(config, bias=False)

    def _output(
        self, x: Tensor, key_mask: Tensor | None, labels: Tensor | None, states: Any
    ) -> SequenceClassifierOutput:
        logits = self.score(_pooled(x, key_mask, causal=self.model.causal))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=states)


class LinattnForTokenClassification(_Classifier):
    """Scores the classes of each token. Labels of -100, and those of missing tokens, have no loss."""

    def __init__(self, config: LinattnConfig):
        super().__init__(config, bias=True)

    def _output(self, x: Tensor, key_mask: Tensor | None, labels: Tensor | None, states: Any) -> TokenClassifierOutput:
        logits, loss = self.score(x), None
        if labels is not None:
            labels = labels if key_mask is None else labels.masked_fill(~key_mask, NO_LABEL)
            loss = self.loss_function(logits, labels, self.config)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=states)


def _present(
    labels: Int[Tensor, "b labels"], key_mask: Bool[Tensor, "b n"] | None, following: int
) -> Int[Tensor, "b labels"]:
    """Return the labels without those of missing tokens, and of tokens after one: a missing token predicts nothing.
    Labels of a token behind the last one (`following` is 1, else 0) are present."""
    if key_mask is None:
        return labels
    key_mask = F.pad(key_mask, (0, following), value=True)
    return labels.masked_fill(~(key_mask & F.pad(key_mask, (1, -1))), NO_LABEL)


def _pooled(x: Float[Tensor, "b n d"], key_mask: Bool[Tensor, "b n"] | None, *, causal: bool) -> Float[Tensor, "b d"]:
    """Return the vector of the last present token if causal, else the mean of all present ones; zeros if there is
    none."""
    present = torch.ones_like(x[..., 0], dtype=torch.bool) if key_mask is None else key_mask
    if causal:
        present = present & (present.flip(1).cumsum(1).flip(1) == 1)
    # a missing token's vector may be anything, NaN too
    return x.masked_fill(~present.unsqueeze(-1), 0).sum(1) / present.sum(1, keepdim=True).clamp(min=1)
