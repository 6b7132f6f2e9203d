"""Small models with known answers, written as Hugging Face directories.

`build_bigram_model`: the next-token distribution depends on the current token only and is given exactly.
`build_chain_model`: one successor per token, so greedy text is known.
`build_t0`: a random two-layer decoder, for tests where attention must matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BIGRAM_VOCAB = 32
BIGRAM_ROWS: dict[int, dict[int, float]] = {5: {9: 0.5, 4: 0.25, 7: 0.125, 1: 0.125}}
"""Current token -> next-token probabilities; tokens without a row are followed by any token, evenly."""

CHAIN_PIECES = ("<s>", "He", "llo ", "wor", "ld!x", "END", "</s>")
CHAIN_SUCCESSORS = {0: 1, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 6}
_IMPOSSIBLE = -50.0


def write_piece_tokenizer(
    directory: Path, pieces: Sequence[str], *, eos_token: str | None = None, specials: Sequence[str] = ()
) -> None:
    """A tokenizer whose token i decodes to `pieces[i]`; text is cut into pieces, the longest first.

    Encoding text that is not made of pieces raises.
    """
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}))
    longest_first = "|".join(map(re.escape, sorted(pieces, key=len, reverse=True)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    _save_tokenizer(tokenizer, directory, eos_token=eos_token, specials=specials)


def write_byte_tokenizer(
    directory: Path,
    specials: Sequence[str] = (),
    *,
    eos_token: str | None = None,
    chat_template: str | None = None,
) -> None:
    """A byte-level tokenizer: id b is the byte b, 256 in all, then the special tokens."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Byte-level BPE writes printable bytes as themselves and the others as characters from 256 on, in order.
    unprintable = (byte for byte in range(256) if chr(byte) not in alphabet)
    stand_ins = sorted(character for character in alphabet if ord(character) >= 256)
    ids = {character: ord(character) for character in alphabet if ord(character) < 256}
    ids |= dict(zip(stand_ins, unprintable, strict=True))
    ids |= {special: 256 + index for index, special in enumerate(specials)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    _save_tokenizer(tokenizer, directory, eos_token=eos_token, specials=specials, chat_template=chat_template)


def _save_tokenizer(
    tokenizer: Tokenizer,
    directory: Path,
    *,
    eos_token: str | None,
    specials: Sequence[str],
    chat_template: str | None = None,
) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos_token,
        additional_special_tokens=[special for special in specials if special != eos_token],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(directory)


def _current_token_model(logits_VV: torch.Tensor, *, eos_token_id: int | None, context: int) -> LlamaForCausalLM:
    """A llama whose next-token logits are row `current token` of `logits_VV`, whatever came before."""
    vocab = len(logits_VV)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=vocab,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    model = _random_llama(config, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        model.model.norm.weight.fill_(1.0)
        # A one-hot row of width V leaves the final norm as 1 / sqrt(1 / V + eps) at its place.
        normed = 1.0 / math.sqrt(1.0 / vocab + config.rms_norm_eps)
        model.lm_head.weight.copy_(logits_VV.T / normed)
    model.generation_config.bos_token_id = None
    model.generation_config.eos_token_id = eos_token_id
    return model


def _random_llama(config: LlamaConfig, *, seed: int) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def build_bigram_model(
    directory: Path,
    rows: Mapping[int, Mapping[int, float]] = BIGRAM_ROWS,
    *,
    eos_token_id: int | None = None,
    context: int = 1024,
) -> Path:
    """Vocabulary of 32; P(next | current) is `rows[current]` exactly, and uniform for tokens without a row."""
    logits_VV = torch.zeros(BIGRAM_VOCAB, BIGRAM_VOCAB)
    for current, probabilities in rows.items():
        logits_VV[current] = _IMPOSSIBLE
        for token, probability in probabilities.items():
            logits_VV[current, token] = math.log(probability)
    _current_token_model(logits_VV, eos_token_id=eos_token_id, context=context).save_pretrained(directory)
    write_piece_tokenizer(directory, [chr(ord("A") + i) if i < 26 else str(i - 26) for i in range(BIGRAM_VOCAB)])
    return directory


def build_chain_model(
    directory: Path,
    successors: Mapping[int, int] = CHAIN_SUCCESSORS,
    pieces: Sequence[str] = CHAIN_PIECES,
    *,
    eos_token_id: int | None = 6,
    context: int = 1024,
) -> Path:
    """One successor per token, 50 nats ahead of the rest; token i decodes to `pieces[i]`.

    A token that `successors` leaves out is followed by any token, evenly.
    """
    highest = max(len(pieces) - 1, eos_token_id or 0, *successors, *successors.values())
    vocab = math.ceil((highest + 1) / 8) * 8
    logits_VV = torch.zeros(vocab, vocab)
    for current, successor in successors.items():
        logits_VV[current, successor] = -_IMPOSSIBLE
    _current_token_model(logits_VV, eos_token_id=eos_token_id, context=context).save_pretrained(directory)
    padded = [*pieces, *(f"<unused{i}>" for i in range(len(pieces), vocab))]
    eos_token = None if eos_token_id is None else padded[eos_token_id]
    write_piece_tokenizer(
        directory, padded, eos_token=eos_token, specials=[piece for piece in ("<s>", eos_token) if piece]
    )
    return directory


def build_t0(directory: Path, *, tied: bool = False, context: int = 1024, seed: int = 0) -> Path:
    """Random two-layer llama: hidden 64, vocabulary 256, float32, untied head unless `tied`."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        # Ten times the usual spread, so that attention and adapters move the logits visibly.
        initializer_range=0.2,
    )
    model = _random_llama(config, seed=seed)
    model.generation_config.bos_token_id = None
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory
