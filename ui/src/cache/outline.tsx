// The prefix tree as an outline, for arrow keys and screen readers.
import { useMemo, useRef, useState } from "preact/hooks";
import { many } from "../format";
import { type Branch, ownerOf } from "./cache";

interface Row {
  branch: Branch;
  depth: number;
}

interface Props {
  roots: Branch[];
  chosen?: number;
  onChoose: (id: number) => void;
  size: (tokens: number) => string;
}

const MOST_ROWS = 300;

export function Outline({ roots, chosen, onChoose, size }: Props) {
  const [open, setOpen] = useState<Set<number>>(() => new Set(roots.slice(0, 3).map(({ node }) => node.id)));
  const box = useRef<HTMLUListElement>(null);
  const rows = useMemo(() => {
    const found: Row[] = [];
    const add = (all: Branch[], depth: number) => {
      for (const branch of [...all].sort((a, b) => b.total - a.total)) {
        found.push({ branch, depth });
        if (open.has(branch.node.id)) add(branch.below, depth + 1);
      }
    };
    add(roots, 0);
    return found.slice(0, MOST_ROWS);
  }, [roots, open]);
  const active = rows.some(({ branch }) => branch.node.id === chosen) ? chosen : rows[0]?.branch.node.id;

  const turn = (id: number, wide?: boolean) =>
    setOpen((old) => {
      const next = new Set(old);
      if (wide ?? !next.has(id)) next.add(id);
      else next.delete(id);
      return next;
    });
  const go = (index: number) => {
    const row = rows[index];
    if (!row) return;
    onChoose(row.branch.node.id);
    requestAnimationFrame(() => box.current?.querySelector<HTMLElement>(`[data-id="${row.branch.node.id}"]`)?.focus());
  };
  const keyed = (event: KeyboardEvent) => {
    const at = rows.findIndex(({ branch }) => branch.node.id === active);
    const row = rows[at];
    if (!row) return;
    const { node, below } = row.branch;
    const parent = rows.findIndex(({ branch }) => branch.node.id === node.parent);
    const acts: Record<string, () => void> = {
      ArrowDown: () => go(at + 1),
      ArrowUp: () => go(at - 1),
      Home: () => go(0),
      End: () => go(rows.length - 1),
      ArrowRight: () => (below.length && !open.has(node.id) ? turn(node.id, true) : go(at + 1)),
      ArrowLeft: () => (open.has(node.id) && below.length ? turn(node.id, false) : parent >= 0 && go(parent)),
      Enter: () => onChoose(node.id),
      " ": () => turn(node.id),
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };

  return (
    <ul class="outline" role="tree" aria-label="Nodes of the prefix tree" ref={box} onKeyDown={keyed}>
      {rows.map(({ branch: { node, below, total }, depth }) => (
        <li
          key={node.id}
          role="treeitem"
          data-id={node.id}
          aria-level={depth + 1}
          aria-expanded={below.length ? open.has(node.id) : undefined}
          aria-selected={node.id === chosen}
          tabIndex={node.id === active ? 0 : -1}
          class={node.id === chosen ? "chosen" : ""}
          style={{ paddingLeft: `${8 + Math.min(depth, 12) * 16}px` }}
          onClick={() => {
            onChoose(node.id);
            if (below.length) turn(node.id);
          }}
        >
          <span class="twig" aria-hidden="true">
            {below.length ? (open.has(node.id) ? "▾" : "▸") : "·"}
          </span>
          <span class="outline-text">{node.text.replace(/\s+/g, " ") || "(no text)"}</span>
          <span class="outline-facts">
            {many(node.tokens, "token")}{below.length > 0 ? `, ${size(total)} with all below` : ""} · {many(node.hits, "hit")} · {ownerOf(node)}
          </span>
        </li>
      ))}
    </ul>
  );
}
