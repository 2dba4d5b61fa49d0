"""Fine-tunes a causal language model of `transformers` with LoRA: only the adapters are trained and travel.

    cp MY-MODEL/config.json examples/recipes/lora/
    computeshare data add letters MY-TEXT
    computeshare jobs create --recipe examples/recipes/lora --arg base=$PWD/MY-MODEL --dataset letters

`MY-MODEL` is a folder written by `save_pretrained`; only the machine that creates the job needs it. `MY-TEXT` is a
folder with train.txt, test.txt and the model's tokenizer.json; without a tokenizer.json a token is a byte.
"""

# requires: transformers>=5
# requires: peft>=0.17

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent


def model(rank=8, alpha=16, targets="all-linear"):
    """The model that config.json describes, with adapters in all linear layers but the last, or in those named."""
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(HERE))
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, target_modules=targets))


def pretrained(model, base):
    """Load the base model's weights. Runs only where the job is created; workers get the result by its digest."""
    weights = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, tensor in model.get_base_model().state_dict().items():
        if "lora_" not in name:
            tensor.copy_(weights[name.replace(".base_layer", "")])


def data(split, folder, block=64):
    """Windows of `block` tokens of the split's text."""
    text = (folder / f"{split}.txt").read_text("utf-8")
    file = folder / "tokenizer.json"
    ids = Tokenizer.from_file(str(file)).encode(text).ids if file.exists() else list(text.encode())
    return Windows(torch.tensor(ids), block)


class Windows(Dataset):
    def __init__(self, ids, block):
        self.ids, self.block = ids, block

    def __len__(self):
        return (len(self.ids) - 1) // self.block

    def __getitem__(self, index):
        start = index * self.block
        return self.ids[start : start + self.block], self.ids[start + 1 : start + self.block + 1]


def loss(model, batch):
    """The mean cross-entropy, in nats per token."""
    inputs, targets = batch
    logits = model(input_ids=inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
