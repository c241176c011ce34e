"""A script for Transformers' `Trainer` as its documentation has torchrun start it; nothing in it knows of shoal."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


class PrintEpochs(TrainerCallback):
    def on_epoch_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"process {args.process_index} of {args.world_size}, epoch {round(state.epoch) - 1}")


class RecordingTrainer(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.rows = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.losses.append(self.accelerator.reduce(loss.detach(), reduction="mean").item())
        self.rows += len(inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="rows of all processes together")
    parser.add_argument("--out", required=True)
    args = parser.parse_args(arguments)

    settings = TrainingArguments(
        output_dir=f"{args.out}-checkpoints",
        num_train_epochs=args.epochs,
        optim="sgd",
        learning_rate=0.2,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        average_tokens_across_devices=False,  # Trainer would multiply a classifier's loss by the number of processes
        disable_tqdm=True,
        use_cpu=True,
    )
    settings.per_device_train_batch_size = args.batch // settings.world_size
    set_seed(0)
    words = torch.randint(0, 8, (256, 6))
    rows = [{"input_ids": row, "labels": (row[0] > 3).long()} for row in words]
    config = BertConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=6,
        initializer_range=0.3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    trainer = RecordingTrainer(
        model=BertForSequenceClassification(config),
        args=settings,
        train_dataset=rows,
        data_collator=default_data_collator,
        callbacks=[PrintEpochs()],
    )
    trainer.train()

    seen = trainer.accelerator.gather(torch.tensor([settings.process_index, trainer.rows])).view(-1, 2)
    if trainer.is_world_process_zero():
        weights = [parameter.flatten().tolist() for parameter in trainer.model.parameters()]
        found = {"losses": trainer.losses, "weights": weights, "rows": dict(seen.tolist())}
        Path(args.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
