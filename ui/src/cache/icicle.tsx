// The prefix tree as an icicle chart: children are below their parent, as wide as their size.
import { useEffect, useRef, useState } from "preact/hooks";
import { count } from "../format";
import { type Branch, ownerOf } from "./cache";

interface Box {
  branch: Branch;
  left: number;
  width: number;
  depth: number;
}

const ROW = 30;
const MOST_ROWS = 12;
const NARROW = 0.002;

function boxes(roots: Branch[]): Box[] {
  const found: Box[] = [];
  const place = (all: Branch[], left: number, scale: number, depth: number) => {
    if (depth >= MOST_ROWS) return;
    for (const branch of [...all].sort((a, b) => b.total - a.total)) {
      const width = branch.total * scale;
      if (width < NARROW) continue;
      found.push({ branch, left, width, depth });
      place(branch.below, left, scale, depth + 1);
      left += width;
    }
  };
  const total = roots.reduce((sum, { total: each }) => sum + each, 0);
  place(roots, 0, 1 / Math.max(1, total), 0);
  return found;
}

export function Icicle({ roots, chosen, onChoose }: { roots: Branch[]; chosen?: number; onChoose: (id: number) => void }) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(800);
  useEffect(() => {
    const watch = new ResizeObserver(() => box.current && setWidth(box.current.clientWidth));
    watch.observe(box.current!);
    return () => watch.disconnect();
  }, []);
  const all = boxes(roots);
  const rows = Math.max(0, ...all.map(({ depth }) => depth + 1));
  const owners = [...new Set(all.map(({ branch }) => ownerOf(branch.node)))];
  return (
    <div class="icicle" ref={box} style={{ height: `${rows * ROW}px` }} aria-hidden="true">
      {all.map(({ branch: { node, total }, left, width: share, depth }) => {
        const color = (owners.indexOf(ownerOf(node)) % 5) + 1;
        const style = { left: `${left * 100}%`, width: `calc(${share * 100}% - 1px)`, top: `${depth * ROW}px`, height: `${ROW - 1}px` };
        return (
          <div key={node.id} class={`ice c${color} ${node.id === chosen ? "chosen" : ""} ${node.locks ? "locked" : ""}`} style={style} title={`${node.text.slice(0, 80)} (${count(total)} tokens)`} onClick={() => onChoose(node.id)}>
            {share * width > 46 ? node.text.replace(/\s+/g, " ").slice(0, Math.floor((share * width) / 6)) : ""}
          </div>
        );
      })}
    </div>
  );
}
