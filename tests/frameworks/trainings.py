"""Trainings of 20 steps on all ranks, each written as its framework's documentation has it.

A training is one function that brings all that it needs, so that it is the same text in a cell of a notebook, in a
function and under torchrun. It returns its parameters, whole, by their names.
"""

from __future__ import annotations

from typing import Any

LIGHT = ("own_group", "fsdp2", "tensor_parallel", "dcp")
"""Need torch alone."""
HEAVY = {
    "accelerator": "accelerate",
    "lightning_ddp": "lightning",
    "trainer": "transformers",
    "lora": "peft",
}
"""What others need."""


def own_group() -> dict[str, Any]:
    """The user's own process group around DistributedDataParallel, made and destroyed as under torchrun."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        x = torch.randn(32, 8, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    return {name: value.detach().clone() for name, value in model.module.named_parameters()}


def fsdp2() -> dict[str, Any]:
    """FSDP2: `fully_shard` on each layer and on the whole."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        x = torch.randn(32, 8, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.full_tensor().detach().clone() for name, value in model.named_parameters()}


def tensor_parallel() -> dict[str, Any]:
    """Tensor parallel: the first layer split by columns, the second by rows; all ranks see the same data."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    for _ in range(20):
        x = torch.randn(32, 8, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.full_tensor().detach().clone() for name, value in model.named_parameters()}


def dcp() -> dict[str, Any]:
    """Distributed checkpoints: a sharded model is saved after 10 steps, and another goes on from there."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from sgpu_magic import runtime

    mesh = init_device_mesh("cpu", (2,))
    folder = runtime.checkpoint_dir() / "step-10"

    def new_model(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: Any, optimizer: Any) -> None:
        for _ in range(10):
            x = torch.randn(32, 8, generator=data)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    data = torch.Generator().manual_seed(dist.get_rank())
    model, optimizer = new_model(7)
    train(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)

    model, optimizer = new_model(8)
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    checkpoint.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(model, optimizer)
    return {name: value.full_tensor().detach().clone() for name, value in model.named_parameters()}


def accelerator() -> dict[str, Any]:
    """accelerate: `Accelerator.prepare` around a model, an optimizer and a loader."""
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    x = torch.randn(20 * 2 * 16, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        steps += 1
    assert (accelerator.num_processes, steps) == (2, 20)
    return {name: value.detach().clone() for name, value in accelerator.unwrap_model(model).named_parameters()}


def lightning_ddp() -> dict[str, Any]:
    """Lightning: a Trainer with `strategy="ddp"`."""
    import lightning
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            return nn.functional.mse_loss(self.net(inputs), targets)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    lightning.seed_everything(7, verbose=False)
    x = torch.randn(20 * 2 * 16, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    assert (trainer.world_size, trainer.global_step) == (2, 20)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def trainer() -> dict[str, Any]:
    """transformers: a Trainer on a tiny random model."""
    import tempfile

    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    class Words(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 20 * 2 * 4

        def __getitem__(self, index: int) -> dict[str, Any]:
            words = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": words, "labels": words[0] % 2}

    set_seed(7)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=20,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=7,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Words())
        trainer.train()
        assert (trainer.args.world_size, trainer.state.global_step) == (2, 20)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def lora() -> dict[str, Any]:
    """PEFT: LoRA adapters on a tiny random language model, trained with DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = DistributedDataParallel(get_peft_model(LlamaForCausalLM(config), lora))
    trained = {name: value for name, value in model.module.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        words = torch.randint(0, 50, (4, 12), generator=data)
        loss = model(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in trained.items()}
